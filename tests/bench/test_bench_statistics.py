"""What is made of samples, and sizes and variants as they are written."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.bench.collectives import LEAST_SAMPLES, MOST_SAMPLES, rounds
from mpishard.bench.host import settings
from mpishard.bench.sizes import fitted, nbytes, readable, sweep
from mpishard.bench.statistics import bus_factor, fit, ratio, summary
from mpishard.bench.variants import Variant, asked, listed, parse_baseline
from mpishard.errors import ConfigError


def test_a_summary_is_the_median_between_the_10th_and_the_90th_percentile() -> None:
    found = summary(np.arange(11.0)[::-1])
    assert (found.p10, found.seconds, found.p90, found.samples) == (1, 5, 9, 11)


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [("all_gather", 2, 0.5), ("reduce_scatter", 4, 0.75), ("all_reduce", 2, 1.0), ("all_reduce", 4, 1.5)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(op: str, ranks: int, factor: float) -> None:
    assert bus_factor(op, ranks) == factor


def test_a_ratio_is_how_many_times_as_fast() -> None:
    assert ratio(6.0, 2.0) == 3
    assert ratio(None, 2.0) is None


def test_a_fit_finds_latency_and_bandwidth() -> None:
    sizes = [4096 * 4**i for i in range(8)]
    found = fit([(size, 2e-5 + size / 5e9) for size in sizes])
    assert found is not None
    assert found.alpha == pytest.approx(2e-5)
    assert found.GBps == pytest.approx(5)
    assert found.worst == pytest.approx(0, abs=1e-9)


def test_small_sizes_count_as_much_as_large_ones_in_a_fit() -> None:
    points = [(4096, 1e-5), (65536, 2.5e-5), (2**26, 2.0e-2)]
    found = fit(points)
    assert found is not None
    assert found.alpha == pytest.approx(1e-5, rel=0.2)
    assert found.worst < 0.25


def test_a_fit_has_no_negative_numbers_and_needs_three_sizes() -> None:
    steeper = fit([(100, 1.0), (200, 10.0), (300, 19.0)])
    assert steeper is not None
    assert steeper.alpha == 0
    falling = fit([(100, 10.0), (200, 5.0), (300, 1.0)])
    assert falling is not None
    assert falling.GBps is None
    assert falling.alpha > 0
    assert fit([(100, 1.0), (200, 1.5), (100, 2.0)]) is None


def test_samples_fill_the_time_between_two_bounds() -> None:
    assert rounds(once=0.01, variants=4, seconds=0.5) == 200
    assert rounds(once=0.1, variants=4, seconds=0.5) == 20
    assert rounds(once=1e-6, variants=4, seconds=0.5) == MOST_SAMPLES
    assert rounds(once=60.0, variants=4, seconds=0.5) == LEAST_SAMPLES


@pytest.mark.parametrize(
    ("text", "size"), [("4KiB", 4096), ("64 mib", 2**26), ("1.5MB", 1_500_000), ("12B", 12), ("0.5KiB", 512)]
)
def test_a_size_has_a_unit(text: str, size: int) -> None:
    assert nbytes("--min", text) == size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "without a unit; write 4KiB"),
        ("4 apples", "apples is no unit of a size"),
        ("-4KiB", "must be a number with a unit"),
        ("", "must be a number with a unit"),
        ("0B", "a whole number of bytes, 1 to 4 GiB"),
        ("0.3B", "a whole number of bytes"),
        ("5GiB", "a whole number of bytes, 1 to 4 GiB"),
    ],
)
def test_any_other_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        nbytes("--max", text)


def test_a_sweep_ends_with_the_largest_size() -> None:
    assert sweep(4, 100, 4) == (4, 16, 64, 100)
    assert sweep(4, 4, 2) == (4,)
    with pytest.raises(ConfigError, match="must not be the larger one"):
        sweep(5, 4, 2)
    with pytest.raises(ConfigError, match="2 or more"):
        sweep(4, 5, 1)


def test_messages_are_dealt_evenly() -> None:
    assert fitted(4096, 3, 4) == 341 * 3
    assert fitted(1, 4, 4) == 4
    assert [readable(size) for size in (12, 1536, 2**26, 2**30)] == ["12 B", "1.5 KiB", "64 MiB", "1 GiB"]


def test_mpi_is_measured_with_each_algorithm_and_the_others_as_they_are() -> None:
    native = Variant("mpi", "native")
    assert asked("mpi,node") == (Variant("mpi"), native, Variant("node"))
    assert asked("node,mpi", "pairwise,auto") == (Variant("node"), Variant("mpi", "pairwise"), Variant("mpi"))
    assert asked("mpi:ring, mpi:ring,node:auto") == (Variant("mpi", "ring"), Variant("node"))
    assert parse_baseline("mpi:native") == native
    assert [variant.name for variant in asked("mpi")] == ["mpi", "mpi:native"]
    assert [variant.ordered for variant in asked("mpi", "auto,alltoall,pairwise,ring,native")] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("transports", "algorithms", "message"),
    [
        ("mpi,tcp", None, "transport 'tcp' is not known; choose among mpi, node"),
        ("mpi:best", None, "algorithm 'best' is not one of mpi; choose among auto"),
        ("node:ring", None, "algorithm 'ring' is not one of node; choose among auto"),
        ("node", "ring", "has none to choose; add mpi"),
        ("mpi", "best", "'best' is not known"),
        (",", None, "--transports is empty"),
        ("mpi", ",", "--algorithms is empty"),
    ],
)
def test_unknown_variants_are_refused(transports: str, algorithms: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked(transports, algorithms)


def test_lists_keep_their_order_and_name_what_is_not_known() -> None:
    assert listed("--dtypes", "bf16, fp32,bf16", ("fp32", "bf16")) == ("bf16", "fp32")
    with pytest.raises(ConfigError, match="--dtypes: 'int8' is not known; choose among fp32, bf16"):
        listed("--dtypes", "int8", ("fp32", "bf16"))


def test_settings_are_told_and_what_a_launcher_says_is_not() -> None:
    told = {"UCX_TLS": "sm", "OMPI_MCA_osc": "^ucx", "OMPI_MCA_ess_base_jobid": "7", "HOME": "/root", "PMI_RANK": "1"}
    assert settings(told) == {"OMPI_MCA_osc": "^ucx", "UCX_TLS": "sm"}
