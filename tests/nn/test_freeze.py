"""Models with frozen parameters: which ones, what schedules are told of them, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mpishard.errors import ConfigError
from mpishard.models.gpt2 import Gpt2, gpt2
from mpishard.models.mlp import MlpClassifier, mlp_classifier
from mpishard.nn.model import freeze
from mpishard.shard.outline import outline_of

GPT = gpt2(Gpt2(layers=3, width=6, heads=3, sequence=5, vocabulary=11))
NAMES = [unit.prefix + spec.name for unit in GPT.units for spec in unit.specs]


def frozen_in(model):
    return [unit.prefix + spec.name for unit in model.units for spec in unit.specs if not spec.trainable]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["wte.weight"], ["wte.weight"]),
        (["w?e.*"], ["wte.weight", "wpe.weight"]),
        (["h.[01].*"], [name for name in NAMES if name.startswith(("h.0.", "h.1."))]),
        (["*.bias", "ln_f.*"], [name for name in NAMES if name.endswith("bias") or name == "ln_f.weight"]),
        (["h.2.mlp.c_fc.weight", "h.2.*"], [name for name in NAMES if name.startswith("h.2.")]),
        ([], []),
    ],
)
def test_patterns_of_whole_names(patterns, names):
    assert frozen_in(freeze(GPT, patterns)) == names
    assert frozen_in(GPT) == []


def test_nothing_else_changes():
    model = freeze(GPT, ("h.1.*",))
    assert model.stages is GPT.stages
    assert model.parameters == GPT.parameters
    assert model.owner(model.stages[2], "attn.c_attn.weight") is model.unit("h.1")
    trained = replace(model, units=tuple(
        replace(unit, specs=tuple(replace(spec, trainable=True) for spec in unit.specs)) for unit in model.units
    ))  # fmt: skip
    assert trained == GPT
    assert freeze(GPT, []) == GPT


def test_what_was_frozen_stays_frozen():
    model = freeze(freeze(GPT, ["wte.*"]), ["wpe.*"])
    assert frozen_in(model) == ["wte.weight", "wpe.weight"]


def test_schedules_are_told():
    """Units and stages of the outline name what is trained, and nothing else."""
    model = freeze(GPT, ["wte.*", "h.0.*", "h.1.attn.*"])
    outline = outline_of(model)
    trained = {(unit.name, spec.name) for unit in GPT.units for spec in unit.specs} - {
        ("root", "wte.weight"),
        *(("h.0", spec.name) for spec in GPT.unit("h.0").specs),
        *(("h.1", spec.name) for spec in GPT.unit("h.1").specs if spec.name.startswith("attn.")),
    }
    assert {(unit.name, name) for unit in outline.units for name in unit.params} == trained
    stages = {stage.name: stage.params for stage in outline.stages}
    assert {param for params in stages.values() for param in params} == trained
    assert stages["embed"] == (("root", "wpe.weight"),)
    assert stages["h.0"] == ()
    assert stages["head"] == (("root", "ln_f.weight"), ("root", "ln_f.bias"))


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("h.7.*", ""),
        ("h.1", r", did you mean h\.1\.\*\?"),
        ("h.[01].attn", r", did you mean h\.\[01\]\.attn\.\*\?"),
        ("wte", r", did you mean wte\.\*\?"),
        ("wte.wieght", r", did you mean wte\.weight or wpe\.weight\?"),
        ("transformer.h.0.*", r", did you mean h\.0\.\*\?"),
        ("lm_head.weight", r", did you mean wte\.weight\?"),
        ("WTE.weight", r".*"),
        ("", ""),
    ],
)
def test_a_pattern_that_matches_nothing(pattern, hint):
    message = rf"^frozen pattern '{re.escape(pattern)}' matches no parameter{hint}; patterns are of whole names, .*$"
    with pytest.raises(ConfigError, match=message) as caught:
        freeze(GPT, ["wpe.*", pattern])
    assert "\n" not in str(caught.value)


def test_nothing_left_to_train():
    message = r"^frozen patterns '\*' leave nothing to train; leave out one of them, or name fewer of the 40 param"
    with pytest.raises(ConfigError, match=message):
        freeze(GPT, ["*"])
    some = freeze(mlp_classifier(MlpClassifier(5, 3, 7, 1)), ["hidden.*"])
    with pytest.raises(ConfigError, match=r"^frozen patterns 'head\.bias', 'head\.w\*' leave nothing to train; "):
        freeze(some, ["head.bias", "head.w*"])


def test_a_text_is_no_list_of_patterns():
    with pytest.raises(ConfigError, match=r"^frozen is the text 'wte\.\*'; it must be a list of patterns"):
        freeze(GPT, "wte.*")
