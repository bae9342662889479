"""A plan: what each rank of a job will hold and send, and what machines it needs, before any memory is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mpishard.errors import ConfigError
from mpishard.nn.model import Model
from mpishard.plan.devices import DEVICES
from mpishard.plan.planner import PLANNED, Job, Planner, planned
from mpishard.plan.state import model_state
from mpishard.shard.precision import precision
from mpishard.shard.schedule import Settings

__all__ = ["Device", "Plan", "Ranks", "plan_job", "plan_model"]

#: what of a plan needs shapes
_SHAPED = ("per_rank", "by_ranks", "devices.*.with_everything", "devices.*.micro_batch")


@dataclass(frozen=True)
class Ranks:
    """A number of ranks.

    Attributes:
        micro_batches: of a rank in a step; 1 where the global batch cannot be dealt evenly (``dealt`` is false).
        hybrid_group: ranks of a group of ``hybrid_shard``; 0 where it is not planned.
        per_rank: strategy -> bytes by category, and their sum as ``peak``; with offload also those in ``host`` memory.
        communication: strategy -> bytes that a rank sends in a step, by kind, and their ``total``.
    """

    ranks: int
    micro_batches: int
    dealt: bool
    hybrid_group: int
    per_rank: Mapping[str, Mapping[str, int]]
    communication: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Device:
    """What a kind of device can hold.

    Attributes:
        memory: bytes.
        model_state_only: devices that hold the textbook's 16 bytes a parameter and nothing else.
        with_everything: the smallest number of ranks, a device each, that ``full_shard`` fits; None where none does.
        why: what is in the way then.
        micro_batch: the largest micro-batch that fits with the plan's strategy at its first number of ranks.
    """

    memory: int
    model_state_only: int
    with_everything: int | None
    why: str
    micro_batch: int | None


@dataclass(frozen=True)
class Plan:
    """The answers, in bytes.

    Attributes:
        parameters: of the model, or the number that was asked for.
        settings: what it was planned with.
        strategy: for which micro-batches were sought.
        model_state_bytes: the textbook's, unsharded.
        by_ranks: one for each number of ranks asked for.
        devices: by name.
        assumed: sizes that were made up for a number of parameters; empty for a model that is known.
        notes: what a reader must know.
        curves: strategy -> (ranks, peak of a rank) points of a picture.
    """

    parameters: int
    settings: Mapping[str, Any]
    strategy: str
    model_state_bytes: Mapping[str, int]
    by_ranks: tuple[Ranks, ...]
    devices: Mapping[str, Device]
    assumed: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    curves: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints, as docs/planning.md describes it."""
        devices = {}
        for name, device in self.devices.items():
            devices[name] = asdict(device)
            if not device.why:
                del devices[name]["why"]
        return {
            "parameters": self.parameters,
            "assumed": bool(self.assumed),
            "assumed_sizes": dict(self.assumed),
            "assumed_fields": list(_SHAPED) if self.assumed else [],
            "settings": dict(self.settings),
            "model_state_bytes": dict(self.model_state_bytes),
            "ranks": self.by_ranks[0].ranks,
            "per_rank": {name: dict(held) for name, held in self.by_ranks[0].per_rank.items()},
            "by_ranks": [asdict(each) for each in self.by_ranks],
            "micro_batch_strategy": self.strategy,
            "devices": devices,
            "notes": list(self.notes),
        }


def plan_model(
    model: Model,
    *,
    ranks: Sequence[int] = (8,),
    strategies: Sequence[str] = PLANNED,
    settings: Settings | None = None,
    dtype: str = "float32",
    reduce_dtype: str = "",
    micro_batch: int = 1,
    global_batch: int = 0,
    node: int = 8,
    transport: str = "auto",
    on_device: bool = False,
    offload: str = "none",
    devices: Mapping[str, int] = DEVICES,
) -> Plan:
    """Return the plan of training ``model`` with AdamW, one of your own layers' making or not. Nothing is allocated.

    Args:
        model: units and stages, such as ``gpt2(sizes)`` returns.
        ranks: numbers of ranks; the first one is what micro-batches are sought for.
        strategies: names of ``PLANNED``, or their aliases.
        settings: prefetch, recomputation, accumulation, and the strategy that micro-batches are sought for.
        dtype, reduce_dtype: as an engine's ``dtype_name`` and ``reduce_dtype``.
        micro_batch, global_batch: samples; without a global batch each rank has one micro-batch.
        node: ranks of a node: a group of ``hybrid_shard`` unless the settings name one.
        transport: ``auto`` (MPI for several ranks, shared memory on one node without GPUs), or the job's.
        on_device: whether arrays are on GPUs, where MPI and NCCL receive a whole unit.
        offload: ``none``, or ``optimizer``.
        devices: name -> bytes.

    Raises:
        ConfigError: a number, name or group cannot be.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"model is a {type(model).__name__}; give a Model, such as gpt2(sizes) returns")
    for name, some in (("ranks", ranks), ("strategies", strategies)):
        if not isinstance(some, tuple | list | range):
            raise ConfigError(f"{name} is {some!r}; it must be a list, such as [{some!r}]")
    numbers: list[tuple[str, object]] = [("micro_batch", micro_batch), ("node", node)]
    numbers += [("ranks", count) for count in ranks] + [("global_batch", global_batch)]
    numbers += [(f"devices[{name!r}]", nbytes) for name, nbytes in devices.items()]
    for name, value in numbers:
        least = int(name != "global_batch")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    if not ranks:
        raise ConfigError("there are no ranks to plan for; give numbers of them, as in ranks=[8, 64]")
    job = Job(
        model,
        settings or Settings(),
        precision(dtype, reduce_dtype),
        micro_batch=micro_batch,
        global_batch=global_batch,
        node=node,
        transport=transport,
        on_device=on_device,
        offload=offload,
    )
    return plan_job(job, tuple(ranks), planned(tuple(strategies)), devices)


def plan_job(
    job: Job,
    ranks: Sequence[int],
    strategies: Sequence[str],
    devices: Mapping[str, int],
    *,
    parameters: int = 0,
    assumed: Mapping[str, Any] | None = None,
    described: Mapping[str, Any] | None = None,
    curve: Sequence[int] = (),
) -> Plan:
    """Return the plan of a job.

    Args:
        parameters: their number, where ``job.model`` is assumed to have about as many.
        assumed: the sizes that were assumed.
        described: settings as the plan's reader knows them.
        curve: numbers of ranks of the curves; a strategy's lacks those that its groups do not divide.
    """
    planner = Planner(job)
    found = tuple(_ranks(planner, count, strategies) for count in ranks)
    sought = job.strategy if job.strategy in strategies else strategies[0]
    number = parameters or job.model.parameters
    state = model_state(number, mixed=job.types.mixed)
    answers: dict[int, Device] = {}
    for memory in devices.values():
        if memory not in answers:
            least, why = planner.least_ranks(memory)
            samples = planner.most_samples(memory, sought, ranks[0])
            answers[memory] = Device(memory, -(-state["total"] // memory), least, why, samples)
    notes = []
    if assumed:
        sizes = ", ".join(f"{name} {value:,}" for name, value in assumed.items() if isinstance(value, int))
        notes.append(f"all but the model state is of assumed sizes, {assumed['source']}: {sizes}")
    if uneven := [each.ranks for each in found if not each.dealt]:
        notes.append(
            f"the global batch cannot be dealt evenly to {', '.join(f'{count:,}' for count in uneven)} ranks; they are "
            "planned with one micro-batch each"
        )
    if devices and any(planner.shares(each.ranks) for each in found):
        notes.append(
            "planned on the CPUs of a node, whose ranks share what they gather; --set device.kind=cuda plans GPUs"
        )
    return Plan(
        number,
        described or {},
        sought,
        state,
        found,
        {name: answers[memory] for name, memory in devices.items()},
        dict(assumed or {}),
        tuple(notes),
        {name: _curve(planner, name, curve) for name in strategies if curve},
    )


def _curve(planner: Planner, strategy: str, counts: Sequence[int]) -> list[tuple[int, int]]:
    group = planner.job.settings.group if strategy == "hybrid_shard" else 0
    return [(count, planner.rank(strategy, count)["peak"]) for count in counts if not group or count % group == 0]


def _ranks(planner: Planner, count: int, strategies: Sequence[str]) -> Ranks:
    job = planner.job
    return Ranks(
        count,
        job.micros(count, job.micro_batch),
        job.dealt(count),
        job.group("hybrid_shard", count) if "hybrid_shard" in strategies else 0,
        {name: planner.rank(name, count) for name in strategies},
        {name: planner.sent(name, count) for name in strategies},
    )
