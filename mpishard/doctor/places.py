"""What the ranks' machines must share: a directory for the run, and the time of day. All is collective."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from mpishard.comm.base import Communicator
from mpishard.doctor.facts import Facts, everybody

__all__ = ["clock_skew", "run_directory"]

_PATIENCE = 3.0  # seconds; a network file system may show a new file late
_ROUNDS = 8


def run_directory(comm: Communicator, directory: Path) -> Facts:
    """Return whether rank 0 can write into a directory, and which ranks see what it wrote there.

    Where the directory is not there yet, it is the nearest one above it. What was written is removed.
    """
    mark, told = None, {"path": "", "name": "", "problem": ""}
    if comm.rank == 0:
        place = directory.absolute()
        while not place.is_dir() and place != place.parent:
            place = place.parent
        told["path"], told["name"] = str(place), f".mpishard-doctor-{secrets.token_hex(8)}"
        try:
            mark = place / told["name"]
            mark.write_text(told["name"])
        except OSError as error:
            told["problem"], mark = error.strerror or str(error), None
    told = everybody(comm, told)[0]
    seen = bool(told["problem"]) or _sees(Path(told["path"]), told["name"])
    saw = everybody(comm, seen)
    if mark is not None:
        mark.unlink(missing_ok=True)
    try:
        free: int | None = shutil.disk_usage(told["path"]).free
    except OSError:
        free = None
    return {
        "path": told["path"],
        "problem": told["problem"],
        "unseen": [rank for rank, sees in enumerate(saw) if not sees],
        "free": everybody(comm, free)[0],
    }


def _sees(place: Path, name: str) -> bool:
    begin = time.monotonic()
    while True:
        try:
            os.listdir(place)  # has a network file system ask again
            if (place / name).read_text() == name:
                return True
        except OSError:
            pass
        if time.monotonic() - begin > _PATIENCE:
            return False
        time.sleep(0.1)


def clock_skew(comm: Communicator) -> list[float]:
    """Return by how many seconds each rank's clock is ahead of rank 0's; what the network hides is not counted."""
    mine = []
    for _ in range(_ROUNDS):
        comm.meet("a comparison of clocks")
        mine.append(time.time())
    every = everybody(comm, mine)
    return [min((one - zero for one, zero in zip(times, every[0], strict=True)), key=abs) for times in every]
