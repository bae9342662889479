"""Numbers as people write them: what is taken, and what is refused with a remedy."""

import pytest

from mpishard.errors import ConfigError
from mpishard.plan.quantities import memory, parameter_count, rank_counts, readable


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("175e9", 175_000_000_000),
        ("7e9", 7 * 10**9),
        ("7_000_000_000", 7 * 10**9),
        ("7B", 7 * 10**9),
        ("1.5B", 1_500_000_000),
        ("124K", 124_000),
        ("2T", 2 * 10**12),
        ("1.5e3", 1500),
        ("1", 1),
        (" 12M ", 12 * 10**6),
        ("1e13", 10**13),
    ],
)
def test_counts_of_parameters(text: str, count: int) -> None:
    assert parameter_count(text) == count


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "at least 1"),
        ("0e9", "at least 1"),
        ("1.5", "no parts of parameters"),
        ("15e-1", "no parts of parameters"),
        ("-7e9", "a whole number above 0"),
        ("nan", "a whole number above 0"),
        ("inf", "a whole number above 0"),
        ("", "a whole number above 0"),
        ("seven", "a whole number above 0"),
        ("7G", "a whole number above 0"),
        ("7e9 7e9", "a whole number above 0"),
        ("٧", "a whole number above 0"),
        ("1e14", "at most 1e13"),
        ("1e999", "at most 1e13"),
        ("1e9999", "a whole number above 0"),
        ("1e-99", "no parts of parameters"),
    ],
)
def test_what_is_no_count_of_parameters(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parameter_count(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("8", (8,)), ("1,8, 64", (1, 8, 64)), ("8,1,8", (8, 1)), ("1000000", (10**6,))]
)
def test_numbers_of_ranks(text: str, counts: tuple[int, ...]) -> None:
    assert rank_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "no plan for zero ranks; give 1"),
        ("1,0", "no plan for zero ranks"),
        ("-4", "no plan for -4 ranks"),
        ("1000001", "no plan for 1000001 ranks"),
        ("", "whole numbers between commas"),
        ("8,", "whole numbers between commas"),
        ("1.5", "whole numbers between commas"),
        ("8 16", "whole numbers between commas"),
        ("many", "whole numbers between commas"),
        ("nan", "whole numbers between commas"),
        ("9" * 5000, "whole numbers between commas"),
    ],
)
def test_what_is_no_number_of_ranks(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rank_counts(text)


@pytest.mark.parametrize(
    ("text", "name", "nbytes"),
    [
        ("24GB", "24GB", 24 * 10**9),
        ("24 gb", "24GB", 24 * 10**9),
        ("24GiB", "24GiB", 24 * 2**30),
        ("1.5TB", "1.5TB", 1_500_000_000_000),
        ("512MiB", "512MiB", 512 * 2**20),
        ("80e3MB", "80e3MB", 80 * 10**9),
        ("1TiB", "1TiB", 2**40),
    ],
)
def test_sizes_of_memory(text: str, name: str, nbytes: int) -> None:
    assert memory(text) == (name, nbytes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("24", r"without a unit; write 24GB \(10\*\*9 bytes\) or 24GiB"),
        ("24Gb/s", "a number with a unit"),
        ("24GBit", "no unit of memory: use one of MB, GB, TB, MiB, GiB, TiB"),
        ("24G", "no unit of memory"),
        ("GB", "a number with a unit"),
        ("-24GB", "a number with a unit"),
        ("nanGB", "a number with a unit"),
        ("0GB", "at least a byte"),
        ("1e-30GB", "at least a byte"),
        ("1e999GB", "no device has so much"),
    ],
)
def test_what_is_no_size_of_memory(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        memory(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (40e9, "40.0 GB"), (2.8e12, "2.8 TB"), (1.6e17, "160,000.0 TB")],
)
def test_bytes_in_words(nbytes: float, text: str) -> None:
    assert readable(nbytes) == text
