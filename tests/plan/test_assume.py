"""The textbook's model state, the shapes that are assumed for a number of parameters, and devices."""

import random

import pytest

from mpishard.errors import ConfigError
from mpishard.models.gpt2 import gpt2
from mpishard.plan.assume import assumed_sizes
from mpishard.plan.devices import DEVICES, chosen
from mpishard.plan.state import model_state


def test_the_model_state_is_16_bytes_a_parameter_in_either_precision() -> None:
    count = 175 * 10**9
    assert model_state(count) == {
        "parameters": 700 * 10**9,
        "masters": 0,
        "gradients": 700 * 10**9,
        "optimizer": 1400 * 10**9,
        "total": 2800 * 10**9,
    }
    assert model_state(count, mixed=True) == {
        "parameters": 350 * 10**9,
        "masters": 700 * 10**9,
        "gradients": 350 * 10**9,
        "optimizer": 1400 * 10**9,
        "total": 2800 * 10**9,
    }
    assert model_state(10**16)["total"] == 16 * 10**16  # exact beyond what a float holds


def test_the_largest_gpt_3_is_met() -> None:
    sizes = assumed_sizes(175 * 10**9)
    assert (sizes.layers, sizes.width, sizes.heads) == (96, 12288, 96)
    assert (sizes.vocabulary, sizes.sequence) == (50257, 2048)


def test_assumed_shapes_have_about_as_many_parameters() -> None:
    draw = random.Random(5)
    for asked in [10**6, 10**13, *(int(10 ** draw.uniform(6, 13)) for _ in range(300))]:
        sizes = assumed_sizes(asked)
        rows, width = sizes.vocabulary + sizes.sequence, sizes.width
        count = rows * width + 2 * width + sizes.layers * (12 * width * width + 13 * width)
        assert abs(count / asked - 1) < 0.03, asked
        assert width % sizes.heads == 0
        if asked > 10**9:
            assert width / sizes.heads >= 64
            assert 100 < width / sizes.layers < 150, asked
    assert gpt2(assumed_sizes(7 * 10**8)).parameters == pytest.approx(7e8, rel=0.03)


def test_counts_that_are_too_small_for_the_vocabulary_still_have_a_model() -> None:
    for asked in (1, 100, 50_000):
        assert gpt2(assumed_sizes(asked)).parameters < 60_000


def test_a_longer_sequence_and_another_vocabulary_are_taken() -> None:
    sizes = assumed_sizes(10**9, vocabulary=128_000, sequence=8192)
    assert (sizes.vocabulary, sizes.sequence) == (128_000, 8192)
    assert gpt2(sizes).parameters == pytest.approx(1e9, rel=0.03)


def test_the_devices_and_their_memory() -> None:
    assert chosen() == DEVICES
    assert {name: size // 10**9 for name, size in DEVICES.items()} == {
        "A100-40GB": 40, "A100-80GB": 80, "H100-80GB": 80, "H200-141GB": 141, "GH200-96GB": 96, "MI250X-64GB": 64
    }  # fmt: skip
    assert list(chosen(["h200-141gb", " A100-40GB"])) == ["H200-141GB", "A100-40GB"]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"no device 'H100-80', did you mean H100-80GB\?; there are A100-40GB, .*24GB"
    ):
        chosen(["H100-80"])
