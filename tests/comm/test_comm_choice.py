"""Which transport carries the ranks' arrays, and what is refused."""

from __future__ import annotations

import pytest

from mpishard.comm.choice import Candidate, choose
from mpishard.errors import ConfigError


def gpu(number: int, *, node: int = 0, aware: bool = True) -> Candidate:
    reason = f"Some MPI says that it {'takes' if aware else 'does not take'} GPU memory"
    return Candidate(node, f"cuda:{number} Some GPU", f"uuid{number}", aware, reason)


CPU = Candidate()
UNAWARE = [gpu(0, aware=False), gpu(1, aware=False)]


@pytest.mark.parametrize(
    ("ranks", "asked", "name", "why"),
    [
        ([CPU, CPU], "auto", "node", ""),
        ([CPU, CPU], "node", "node", ""),
        ([CPU, Candidate(1)], "auto", "mpi", ""),
        ([CPU, Candidate(1)], "hierarchical", "hierarchical", ""),
        ([CPU, CPU], "mpi", "mpi", ""),
        ([gpu(0), gpu(1)], "auto", "mpi", "Some MPI says that it takes GPU memory"),
        ([gpu(0), gpu(1)], "mpi", "mpi", "Some MPI says that it takes GPU memory"),
        ([gpu(0), gpu(1)], "staged", "staged", ""),
        ([gpu(0), gpu(1)], "nccl", "nccl", ""),
        (UNAWARE, "auto", "staged", "Some MPI says that it does not take GPU memory"),
        ([gpu(0), gpu(1, aware=False)], "auto", "staged", "on rank 1 Some MPI says that it does not take GPU memory"),
        # the same number on another machine
        ([gpu(0), gpu(0, node=1)], "auto", "mpi", "Some MPI says that it takes GPU memory"),
    ],
)
def test_what_is_chosen(ranks: list[Candidate], asked: str, name: str, why: str) -> None:
    assert choose(ranks, asked) == (name, why)


def test_ranks_that_share_a_gpu_may_be_allowed_to() -> None:
    assert choose([gpu(0), gpu(0)], "staged", share_device=True)[0] == "staged"


@pytest.mark.parametrize(
    ("ranks", "asked", "share", "message"),
    [
        ([CPU, Candidate(problem="no GPU is visible")], "auto", False, "^rank 1: no GPU is visible$"),
        ([gpu(0)._replace(asked="mpi"), gpu(1)._replace(asked="nccl")], "mpi", False, "rank 1 asks for transport nccl"),
        ([gpu(0), CPU], "auto", False, "rank 0 computes on a GPU .* and rank 1 on the CPU; give all ranks a GPU"),
        ([CPU, CPU], "staged", False, "'staged' carries arrays of a GPU .*use transport auto or mpi"),
        ([CPU, Candidate(1)], "node", False, "of one host and the ranks are on 2; use transport auto, mpi or"),
        ([gpu(0), gpu(1)], "node", False, "'node' carries arrays in host memory .* on a GPU; use .* mpi, staged, nccl"),
        ([gpu(0), gpu(1)], "hierarchical", False, "'hierarchical' carries arrays in host memory"),
        ([CPU, CPU], "nccl", False, "'nccl' carries arrays of a GPU .*use transport auto or mpi"),
        (UNAWARE, "mpi", False, "Some MPI says that it does not .*use transport staged.* MPISHARD_GPU_AWARE=1"),
        ([gpu(0), gpu(0)], "auto", False, r"ranks 0 and 1 use one GPU \(cuda:0 .*, uuid0, node 0\).*device\.share"),
        ([gpu(0), gpu(1), gpu(0), gpu(0)], "auto", False, "ranks 0, 2 and 3 use one GPU"),
        ([gpu(0), gpu(0)], "nccl", True, "ranks 0 and 1 use one GPU .*NCCL takes one rank for each GPU$"),
    ],
)
def test_what_is_refused(ranks: list[Candidate], asked: str, share: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(ranks, asked, share)
    assert "\n" not in str(caught.value)
