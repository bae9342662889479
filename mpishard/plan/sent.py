"""What a rank sends in a training step, by kind of collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mpishard.comm.frames import FRAME_BYTES
from mpishard.shard.instructions import Agree, AllReduce, Gather, Instruction, Reduce, Replicate
from mpishard.shard.precision import Precision

__all__ = ["PARTS", "SETTLED", "sent_in_a_step"]

#: what is counted: in the whole job or in a rank's group; among the ranks of different groups that hold the same shard
#: (``across``); and the records by which ranks agree
PARTS = ("all_gather", "reduce_scatter", "across_all_gather", "across_reduce_scatter", "records")
#: micro-batches after which a further one holds nothing else, and sends what the one before did
SETTLED = 3


def sent_in_a_step(
    listed: Callable[[int], Sequence[Instruction]],
    micros: int,
    shards: Mapping[str, int],
    types: Precision,
    ranks: int,
    group: int,
) -> dict[str, int]:
    """Return the bytes that a rank sends to others in a step, by ``PARTS``, and their ``total``.

    Args:
        listed: micro-batches of a rank -> the list of its step.
        micros: how many there are. Those after the third are not walked, since each repeats the one before.
        shards: unit -> elements of 1/ranks of its flat buffer.
        group: ranks that share one copy of the state; ``ranks`` but for ``hybrid_shard``.
    """
    found = _sent(listed(min(micros, SETTLED)), shards, types, ranks, group)
    if more := micros - min(micros, SETTLED):
        before = _sent(listed(SETTLED - 1), shards, types, ranks, group)
        found = {part: count + more * (count - before[part]) for part, count in found.items()}
    found["records"] += FRAME_BYTES * (ranks - 1)  # a step begins with one: that it is this one
    return found | {"total": sum(found.values())}


def _sent(
    schedule: Sequence[Instruction], shards: Mapping[str, int], types: Precision, ranks: int, group: int
) -> dict[str, int]:
    found = dict.fromkeys(PARTS, 0)
    groups = ranks // group
    for step in schedule:
        if isinstance(step, Agree):
            found["records"] += FRAME_BYTES * (ranks - 1)
        elif isinstance(step, Gather):
            found["all_gather"] += types.kind.itemsize * shards[step.unit] * groups * (group - 1)
        elif isinstance(step, Reduce):
            found["reduce_scatter"] += types.wire.itemsize * shards[step.unit] * groups * (group - 1)
        elif isinstance(step, Replicate):
            found["all_gather"] += types.wide.itemsize * shards[step.unit] * (ranks - 1)
        elif isinstance(step, AllReduce):
            for part in ("across_all_gather", "across_reduce_scatter"):
                found[part] += types.wide.itemsize * shards[step.unit] * (groups - 1)
    return found
