"""What a job will hold and send, before it is queued.

``plan_model(model, ranks=[64, 512])`` plans any model, with layers of one's own too; ``mpishard plan`` is the program's
side of it.
"""

from mpishard.plan.devices import DEVICES
from mpishard.plan.planner import PLANNED
from mpishard.plan.report import Device, Plan, Ranks, plan_model

__all__ = ["DEVICES", "PLANNED", "Device", "Plan", "Ranks", "plan_model"]
