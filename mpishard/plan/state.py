"""The textbook's model state: 16 bytes a parameter, unsharded.

Adam in fp32 keeps 4 bytes each of parameter, gradient and two moments. Mixed precision keeps a parameter and a gradient
in 2 bytes, and a master and two moments in fp32: 16 again (Rajbhandari et al. 2020, section 3.1).
"""

from __future__ import annotations

__all__ = ["model_state"]


def model_state(parameters: int, *, mixed: bool = False) -> dict[str, int]:
    """Return bytes by part, and their ``total``, of so many parameters; ``mixed`` with 16-bit parameters."""
    found = {
        "parameters": (2 if mixed else 4) * parameters,
        "masters": (4 if mixed else 0) * parameters,
        "gradients": (2 if mixed else 4) * parameters,
        "optimizer": 8 * parameters,
    }
    return found | {"total": sum(found.values())}
