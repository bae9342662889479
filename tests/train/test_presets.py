"""The presets: which there are, and the sizes of the models that they name."""

import pytest

from mpishard.models.gpt2 import gpt2
from mpishard.train.config import check_ranks, load, presets
from mpishard.train.model import sizes_of


def test_the_presets_are_pinned_and_described():
    gpts = {"gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b", "gpt-7b", "gpt3-175b"}
    assert set(presets()) == {"demo", "tiny"} | gpts
    assert all(len(text) > 20 and not text.startswith("[") for text in presets().values())


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-124m", 124.4), ("gpt2-355m", 354.8), ("gpt2-774m", 774.0), ("gpt2-1.5b", 1557.6)]
)
def test_the_gpt2_presets_have_the_published_number_of_parameters(name, millions):
    model = load(preset=name).model
    block = 12 * model.width**2 + 13 * model.width
    total = model.layers * block + (model.vocabulary + model.sequence + 2) * model.width
    assert round(total / 1e6, 1) == millions
    assert model.width // model.heads == 64


@pytest.mark.parametrize(
    ("name", "parameters", "shape", "head"),
    [("gpt-7b", 6_658_404_352, (32, 4096, 32), 128), ("gpt3-175b", 174_604_259_328, (96, 12288, 96), 128)],
)
def test_the_gpt3_presets_have_the_shapes_of_the_paper(name, parameters, shape, head):
    """Brown et al. 2020, table 2.1: 6.7 and 175 billion parameters, with 2048 positions."""
    config = load(preset=name)
    model = config.model
    assert gpt2(sizes_of(model)).parameters == parameters
    assert (model.layers, model.width, model.heads) == shape
    assert model.width // model.heads == head
    assert (model.positions or model.sequence) == 2048
    assert config.precision.compute == "fp32"
    check_ranks(config, 1024)


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_small_presets_share_a_step_among_few_ranks(name):
    config = load(preset=name)
    for size in (1, 2, 4):
        check_ranks(config, size)
