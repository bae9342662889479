"""What follows from facts that were made up."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from mpishard.doctor.findings import Finding
from mpishard.doctor.judge import judge_clocks, judge_gpus, judge_machine, judge_mpi, judge_settings
from mpishard.doctor.measure import Peers, Progress, hidden_share, pairs
from mpishard.doctor.measured import judge_peers, judge_progress, judge_trial
from mpishard.doctor.tables import binary, core_ranges
from mpishard.doctor.trial import Trial, Try

MPI = {
    "library": "MPICH 5.0.2",
    "version": "MPICH Version: 5.0.2",
    "thread_provided": "multiple",
    "gpu_aware": False,
    "gpu_aware_reason": "MPICH 5.0.2 says that it does not take GPU memory",
}
NO_GPU = {"problem": "the package CuPy is not installed", "installed": None, "openable": None, "visible": []}


def gpu(number: int) -> dict[str, Any]:
    place = f"0000:0{number}:00.0"
    return {"index": number, "name": "A100", "place": place, "uuid": f"GPU-{number}", "memory": 8 << 30}


def facts(*changes: dict[str, Any], ranks: int = 2) -> list[dict[str, Any]]:
    """Ranks of one healthy node with 8 cores; the first change is rank 0's, and so on."""
    found = []
    for rank in range(ranks):
        one = {
            "rank": rank,
            "host": "n1",
            "node": 0,
            "local_rank": rank,
            "local_size": ranks,
            "mpi": MPI,
            "launcher": {"size": ranks, "settings": {}},
            "cores": list(range(8)),
            "cpus": 8,
            "thread_warning": "",
            "limits": {"address_space": None, "locked": None, "files": 1024, "stack": None},
            "shared_memory": {"total": 8 << 30, "free": 4 << 30},
            "large_pages": True,
            "infiniband": False,
            "gpus": NO_GPU,
        }
        found.append(copy.deepcopy(one | (changes[rank] if rank < len(changes) else {})))
    return found


def all_of(ranks: list[dict[str, Any]], device: str = "auto") -> list[Finding]:
    return [*judge_mpi(ranks), *judge_gpus(ranks, device), *judge_machine(ranks)]


def names(found: list[Finding]) -> list[str]:
    return [one.name for one in found]


def test_healthy_ranks_have_no_findings() -> None:
    assert all_of(facts()) == []
    assert all_of(facts(ranks=1)) == []


def test_a_thread_level_that_is_too_low() -> None:
    (found,) = all_of(facts({}, {"mpi": MPI | {"thread_provided": "funneled"}}))
    assert (found.name, found.ranks) == ("thread-level", (1,))
    assert found.text.startswith("MPI gives rank 1 MPI_THREAD_FUNNELED")
    assert found.remedy.startswith("set MPI4PY_RC_THREAD_LEVEL=serialized")
    assert all_of(facts({"mpi": MPI | {"thread_provided": "serialized"}})) == []


def test_another_mpi_on_another_node() -> None:
    (found,) = all_of(facts({}, {"mpi": MPI | {"version": "MPICH Version: 4.2.0"}, "host": "n2", "node": 1}))
    assert found.line == (
        "rank 1 on n2 has MPICH Version: 4.2.0, rank 0 MPICH Version: 5.0.2; load the same MPI on every node"
    )


def test_a_launcher_that_counts_others() -> None:
    (found,) = all_of(facts({"launcher": {"size": 4}}, {"launcher": {"size": 4}}))
    assert found.line == "rank 0 was told of 4 processes and MPI of 2 ranks; use the mpiexec of MPICH 5.0.2"


def test_two_ranks_on_one_gpu() -> None:
    both = {"problem": "", "installed": 1, "openable": 1, "visible": [gpu(0)]}
    (found,) = all_of(facts({"gpus": both}, {"gpus": both}))
    assert (found.name, found.ranks) == ("gpu-shared", (0, 1))
    assert "ranks 0 and 1 on n1 would use one GPU (GPU-0); start as many ranks a node as it has GPUs" in found.line
    assert all_of(facts({"gpus": both}, {"gpus": both}), "cpu") == []
    apart = facts({"gpus": both}, {"gpus": both, "node": 1, "host": "n2"})
    assert all_of(apart) == []


def test_the_same_gpu_under_another_index() -> None:
    first = {"problem": "", "installed": 2, "openable": 2, "visible": [gpu(0), gpu(1)]}
    second = {"problem": "", "installed": 2, "openable": 2, "visible": [gpu(1), gpu(0)]}
    assert names(all_of(facts({"gpus": first}, {"gpus": first}))) == []
    assert names(all_of(facts({"gpus": first}, {"gpus": second}))) == ["gpu-shared"]


@pytest.mark.parametrize(("openable", "name"), [(1, "gpu-isolated"), (2, "gpu-masked")])
def test_each_rank_sees_one_gpu_only(openable: int, name: str) -> None:
    own = [{"problem": "", "installed": 2, "openable": openable, "visible": [gpu(n)]} for n in range(2)]
    (found,) = all_of(facts({"gpus": own[0]}, {"gpus": own[1]}))
    assert found.name == name
    assert bool(found.remedy) == (name == "gpu-isolated")


def test_gpus_that_are_not_seen_or_not_used() -> None:
    seen = {"problem": "", "installed": 4, "openable": 4, "visible": [gpu(0), gpu(1), gpu(2)]}
    found = all_of(facts({"gpus": seen}, {"gpus": seen}))
    assert [one.line for one in found] == [
        "n1 has 4 GPUs and its ranks see 3",
        "1 of 3 GPUs that are seen on n1 stay unused",
    ]


def test_a_gpu_that_cannot_be_used() -> None:
    broken = NO_GPU | {"installed": 1, "openable": 1, "problem": "the package CuPy is not installed; pip install it"}
    (found,) = all_of(facts({"gpus": broken}, {"gpus": broken}))
    assert found.line == "no GPU can be used on n1: the package CuPy is not installed; pip install it"
    assert names(all_of(facts(), "cuda")) == ["gpu-unusable"]


def test_threads_and_cores() -> None:
    (found,) = all_of(facts({"thread_warning": "each rank starts many; set OPENBLAS_NUM_THREADS=1"}))
    assert (found.name, found.ranks, found.remedy) == ("threads", (0,), "set OPENBLAS_NUM_THREADS=1")
    (found,) = all_of(facts({"cores": [3]}, {"cores": [3]}))
    assert found.text == "ranks 0 and 1 on n1 are bound to 1 core of 8 together"
    assert all_of(facts({"cores": [3]}, {"cores": [4]})) == []
    (found,) = all_of(facts(ranks=9))
    assert found.line == "9 ranks run on the 8 cores of n1; start as many as there are cores, or fewer"


def test_one_host_that_counts_as_two_nodes() -> None:
    (found,) = all_of(facts({}, {"node": 1}))
    assert found.line == "MPI counts the ranks on n1 as 2 nodes, which share no memory"
    assert all_of(facts({}, {"node": 1, "host": "n2"})) == []


def test_limits() -> None:
    def limited(**limits: int) -> list[Finding]:
        return all_of(facts({"limits": facts()[0]["limits"] | limits}))

    (found,) = limited(address_space=1 << 30)
    assert found.text == "rank 0 on n1 may use 1,024 MiB of addresses (ulimit -v)"
    assert names(limited(files=64)) == ["open-files"]
    assert names(limited(locked=64 << 10)) == []
    (found,) = all_of(facts({"infiniband": True, "limits": facts()[0]["limits"] | {"locked": 64 << 10}}))
    assert found.name == "locked-memory"


def test_shared_memory() -> None:
    (found,) = all_of(facts({"shared_memory": {"total": 64 << 20, "free": 4 << 20}}))
    assert found.text == "/dev/shm of n1 has 4 MiB left and 2 ranks want 32 MiB"
    assert "is not there" in all_of(facts({"shared_memory": None}))[0].text
    assert all_of(facts({"shared_memory": None}, ranks=1)) == []


def test_small_pages() -> None:
    (found,) = all_of(facts({"large_pages": False}))
    assert found.name == "small-pages"
    assert found.text.startswith("shared memory of n1 has small pages")
    assert all_of(facts({"large_pages": None})) == all_of(facts({"large_pages": False}, ranks=1)) == []


def test_settings_of_open_mpi() -> None:
    other = {"mpi": MPI | {"library": "Open MPI 5.0.11"}}
    yields = {"launcher": {"size": 2, "settings": {"OMPI_MCA_mpi_yield_when_idle": "1"}}}
    assert names(list(judge_settings(facts(other | yields, other)))) == ["yields"]
    assert list(judge_settings(facts(other | yields | {"cpus": 1}, other))) == []
    assert list(judge_settings(facts(yields))) == []
    assert names(list(judge_settings(facts(other, other | {"host": "n2", "node": 1})))) == ["tcp-links"]
    assert list(judge_settings(facts(other | {"infiniband": True}, other | {"host": "n2", "node": 1}))) == []


def test_clocks() -> None:
    ranks = facts({}, {"host": "n2"}, {"host": "n3"}, ranks=3)
    (found,) = judge_clocks(ranks, [0.0, 3.0, -4.0])
    assert found.line.startswith("the clocks of n2 and n3 are 7.0 s apart; set them by NTP")
    assert list(judge_clocks(ranks, [0.0, 0.4, -0.4])) == []


# --- what a child job came to


def tried(*tries: Try, **others: Any) -> list[Finding]:
    aware = others.pop("aware", False)
    mpi = MPI | {"gpu_aware": aware, "gpu_aware_reason": "X says that it takes GPU memory" if aware else "X says not"}
    return list(judge_trial(Trial(("mpiexec", "-n", "2"), **({"ranks": 2} | others), tries=list(tries)), mpi))


GOOD, CRASH = Try("all-to-all", "GPU", 4096, "ok"), Try("all-to-all", "GPU", 1 << 20, "crash", "Segmentation fault")


def test_a_child_job_that_found_nothing() -> None:
    assert tried(Try("broadcast", "host", 4096, "ok"), Try("transport node", "host", 4096, "impossible", "x")) == []


def test_a_child_job_that_did_not_start() -> None:
    (found,) = tried(problem="not enough slots", ranks=0)
    assert found.line.startswith("the child job that tries each call does not start (not enough slots); give its")
    assert names(tried(GOOD, CRASH, aware=True, problem="gone")) == ["child-job", "gpu-crash"]
    assert names(tried(GOOD, aware=True, ranks=1)) == ["child-alone"]


@pytest.mark.parametrize("outcome", ["crash", "hang", "wrong", "failed"])
def test_host_memory_that_does_not_work(outcome: str) -> None:
    (found,) = tried(Try("broadcast", "host", 4096, outcome, "why"))
    assert found.name == f"host-{outcome}"
    assert found.line.startswith(f"broadcast of 4096 bytes in host memory: {outcome} (why); try another transport")


def test_an_mpi_that_says_it_takes_gpu_memory_and_crashes() -> None:
    (found,) = tried(GOOD, CRASH, aware=True)
    assert found.name == "gpu-crash"
    assert found.line == (
        "X says that it takes GPU memory, and all-to-all of 1048576 bytes on a GPU: crash (Segmentation fault); set "
        "MPISHARD_GPU_AWARE=0, or comm.transport = staged or nccl"
    )


def test_an_mpi_that_says_it_does_not_take_gpu_memory() -> None:
    (found,) = tried(GOOD, CRASH)
    assert (found.name, found.remedy) == ("not-gpu-aware", "")
    (found,) = tried(GOOD)
    assert (found.name, found.remedy) == ("gpu-aware-untold", "")
    assert tried(GOOD, aware=True) == []


def test_a_transport_on_a_gpu_that_does_not_work() -> None:
    (found,) = tried(Try("transport nccl", "GPU", 4096, "failed", "NcclError"))
    assert found.line.startswith("transport nccl on a GPU: failed (NcclError); use another transport")


# --- what was measured


def test_a_slow_pair_is_named() -> None:
    rates = {(0, 1): 10e9, (0, 2): 11e9, (1, 2): 2e9}
    peers = [Peers(ranks, True, 1e-6, {1 << 20: rate}, {}) for ranks, rate in rates.items()]
    (found,) = judge_peers(peers)
    assert (found.name, found.ranks) == ("slow-pair", (1, 2))
    assert found.text == "ranks 1 and 2 reach 2.00 GB/s and pairs like them 10.00 GB/s"
    assert list(judge_peers(peers[1:])) == []
    across = [*peers[:2], Peers((1, 2), False, 1e-6, {1 << 20: 2e9}, {})]
    assert list(judge_peers(across)) == []
    by_transport = [Peers(one.ranks, True, 1e-6, {1 << 20: 9e9}, one.mpi) for one in peers]
    assert names(list(judge_peers(by_transport))) == ["slow-pair"]


def test_the_share_hidden() -> None:
    assert hidden_share(2.0, 1.0, 2.0) == 1.0
    assert hidden_share(2.0, 1.0, 3.0) == 0.0
    assert hidden_share(2.0, 2.0, 3.0) == 0.5
    assert hidden_share(1.0, 1.0, 5.0) == 0.0
    assert hidden_share(1.0, 4.0, 3.0) is None


def test_why_little_is_hidden() -> None:
    def why(transport: str, cores: int, together: float) -> list[str]:
        return [one.text for one in judge_progress(Progress(1, 1.0, 1.0, together), transport, cores, 2)]

    assert why("mpi", 8, 1.2) == []
    (told,) = why("mpi", 2, 1.9)
    assert told == "10% of communication was hidden: 2 ranks have 2 cores, and moving data needs a core, too"
    assert "node copies while a rank waits" in why("node", 8, 2.0)[0]
    assert "BLAS threads" in why("mpi", 8, 2.0)[0]


def test_which_pairs_are_measured() -> None:
    assert pairs([0]) == []
    assert pairs([0, 0, 1]) == [(0, 1), (0, 2), (1, 2)]
    many = pairs([rank // 4 for rank in range(64)])
    assert len(many) <= 28
    assert (0, 1) in many
    assert (0, 4) in many
    assert (0, 5) not in many
    assert len(pairs(list(range(64)))) == 28


def test_words() -> None:
    assert core_ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"
    assert core_ranges([]) == ""
    assert (binary(64 << 10), binary(16 << 20)) == ("64 KiB", "16 MiB")
