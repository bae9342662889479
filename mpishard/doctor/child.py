"""The child job of the doctor: tries one thing after another and says so in lines that its parent reads.

``python -m mpishard.doctor.child MEMORY FIRST LIMIT``: with ``gpu`` for MEMORY the GPU's, too; FIRST things are left
out, which an earlier job came past; LIMIT is the seconds that one may take, after which the process ends with its
stack on standard error. A line is ``@doctor`` and a JSON object: ``{"ranks", "library", "things": [...]}`` first, then
``{"begin": N}`` and ``{"end": N, "outcome", "text"}`` for each (ok, wrong, failed or impossible), then
``{"over": true}``.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence

__all__ = ["MARK", "main", "say"]

MARK = "@doctor "
_DRAIN = 1.0  # seconds


def say(**facts: object) -> None:
    """Write one line at once, so that lines of several ranks do not mix."""
    os.write(1, f"\n{MARK}{json.dumps(facts)}\n".encode())


def main(arguments: Sequence[str]) -> int:
    """Try everything; see the top of the file."""
    memory, first, limit = arguments[0], int(arguments[1]), float(arguments[2])
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    from mpishard.comm.attempts import attempts
    from mpishard.comm.starting import load_mpi
    from mpishard.errors import ConfigError
    from mpishard.launched import environment_local_rank

    world = load_mpi().COMM_WORLD
    rank = world.Get_rank()
    things = attempts(world, memory == "gpu", environment_local_rank())
    library = ".".join(map(str, load_mpi().get_vendor()[1]))
    if rank == 0:
        named = [[one.what, one.memory, one.nbytes] for one in things]
        say(ranks=world.Get_size(), library=f"{load_mpi().get_vendor()[0]} {library}", things=named)
    for number, thing in list(enumerate(things))[first:]:
        faulthandler.dump_traceback_later(limit, exit=True)
        if rank == 0:
            say(begin=number)
        outcome = "wrong"
        try:
            problem = thing.run()
        except ConfigError as error:  # on all ranks
            outcome, problem = "impossible", str(error)
        except Exception as error:  # the other ranks may wait for this one inside the call
            text = str(error).strip().partition("\n")[0]
            say(end=number, outcome="failed", text=f"on rank {rank}, {type(error).__name__}: {text}")
            time.sleep(_DRAIN)  # a launcher that ends the job may lose what was said just before
            world.Abort(1)
        problems = world.gather(problem, 0)
        if rank == 0:
            everywhere = outcome == "impossible"
            told = [text if everywhere else f"on rank {source}, {text}" for source, text in enumerate(problems) if text]
            say(end=number, outcome=outcome if told else "ok", text=told[0] if told else "")
    if rank == 0:
        say(over=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
