"""Ranks and their collectives: one contract and its transports. Importing this starts no MPI.

Which transport a program runs on is decided once, by :func:`world`::

    comm = world(ops)                   # MPI under mpiexec or srun, one rank otherwise
    comm = world(make_ops)              # the same on GPUs: make_ops(local rank) chooses one before MPI starts
    results = run_threads(4, main)      # four ranks as threads of this process, for tests
"""

from mpishard.comm.base import Communicator, Node, Tally
from mpishard.comm.launch import world
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads

__all__ = ["Communicator", "LocalCommunicator", "Node", "Tally", "run_threads", "world"]
