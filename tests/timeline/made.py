"""Times of a small step that somebody made up, as the files that ranks leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpishard.shard.traced import FORMAT, traces

#: (instruction, kind, milliseconds on a rank that waits for nobody)
STEP = [
    ("Gather(h.0)", "start", 1),
    ("Gather(h.1)", "start", 1),
    ("Await(h.0)", "wait", 0),
    ("Forward(h.0)", "compute", 10),
    ("Await(h.1)", "wait", 0),
    ("Backward(h.1)", "compute", 20),
    ("Reduce(h.1)", "start", 1),
    ("Absorb(h.1)", "wait", 0),
    ("Agree", "wait", 0),
    ("Update(h.1)", "compute", 5),
]
NAMES = [name for name, _, _ in STEP]
#: rank 1 takes so much longer for Forward(h.0)
LATER = 30


def record(rank: int = 0, ranks: int = 2, ahead: float = 0.0, steps: int = 2, **changes: Any) -> dict[str, Any]:
    """Return what a rank leaves: rank 1 is late, and the others wait for it in Absorb, 10 ms longer than they need.

    Args:
        ahead: of its clock.
    """
    listed = []
    for step in range(steps):
        now = 100.0 + step + ahead
        times, arrivals = [now], {}
        for index, (name, kind, spent) in enumerate(STEP):
            took = spent + (LATER if rank == 1 and name == "Forward(h.0)" else 0)
            if name == "Absorb(h.1)":
                took = 10 if rank == 1 else 10 + LATER
            now += took / 1000
            times.append(now)
            if kind == "wait":
                arrivals[index] = now
        listed.append({
            "step": 10 + step, "came": times[0] - 0.002, "times": times, "arrivals": list(arrivals.items()),
        })  # fmt: skip
    return {
        "format": FORMAT,
        "rank": rank,
        "ranks": ranks,
        "host": f"n{rank}",
        "transport": "mpi",
        "progress": "background",
        "clock": [ahead, 0.0],
        "instructions": NAMES,
        "kinds": [kind for _, kind, _ in STEP],
        "steps": listed,
        **changes,
    }


def write(run: Path, *records: dict[str, Any]) -> Path:
    """Write a run directory with these traces; by default those of two ranks."""
    folder = traces(run)
    folder.mkdir(parents=True)
    for rank, each in enumerate(records or (record(0), record(1))):
        (folder / f"rank-{rank:05d}.json").write_text(json.dumps(each), encoding="utf-8")
    return run
