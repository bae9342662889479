"""Text from checkpoints: the same on any number of ranks, and as asked."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import save
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads
from mpishard.errors import CheckpointError, ConfigError
from mpishard.models.gpt2 import Gpt2, public_config, sizes_from
from mpishard.train import start
from mpishard.train.config import load
from mpishard.train.generate import Request, generate
from mpishard.train.public import check_weights, public_sizes
from mpishard.train.sample import choose
from tests.checkpoint.runs import UNREADABLE, alone, unreadable

TINY = ["model.sequence=16", "train.steps=3", "train.global_batch=4", "train.micro_batch=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    start.run(load(None, "tiny", TINY), folder, LocalCommunicator(NumpyOps()))
    return folder


def request(**changes):
    asked = {"text": "def ", "numbers": None, "count": 20, "temperature": 1.0, "top_k": 0, "seed": 1} | changes
    return Request(**asked)


def text(source, ranks=1, **changes):
    told = []

    def main(comm):
        return generate(source, request(**changes), comm, told.append if comm.rank == 0 else lambda token: None)

    found = [main(LocalCommunicator(NumpyOps()))] if ranks == 1 else run_threads(ranks, main)
    assert found == [found[0]] * ranks
    prompt = list((changes.get("text") or "def ").encode()) if not changes.get("numbers") else list(changes["numbers"])
    assert found[0][: len(prompt)] == prompt
    assert found[0][len(prompt) :] == told
    return told


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"temperature": 0.0}, {"count": 40}, {"text": "a" * 30}])
def test_any_number_of_ranks_gives_the_same_text(run, changes):
    alone = text(run, **changes)
    assert len(alone) == changes.get("count", 20)
    for ranks in (2, 3, 4):
        assert text(run, ranks, **changes) == alone


def test_the_seed_selects_the_text(run):
    assert text(run) == text(run)
    assert text(run, seed=2) != text(run)
    assert text(run, seed=2, temperature=0.0) == text(run, temperature=0.0)


def test_a_run_a_checkpoint_and_bare_weights_are_taken_alike(run, tmp_path):
    checkpoint = run / "checkpoints" / "step-00000003"
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    assert text(run) == text(checkpoint) == text(tmp_path, 2)


def test_a_window_of_the_positions_slides(run):
    """Past the positions the text depends on the last 16 tokens alone, as in training."""
    tokens = text(run, count=40, temperature=0.0)
    again = text(run, numbers=tuple(tokens[-20:-4]), text=None, count=4, temperature=0.0)
    assert again == tokens[-4:]


def test_no_optimiser_state_is_held(run):
    from mpishard.models.gpt2 import gpt2
    from mpishard.shard.schedule import Settings
    from mpishard.train.room import planned

    model = gpt2(Gpt2(2, 32, 2, 16, 256))
    held = planned(model, LocalCommunicator(NumpyOps()), None, Settings(), 1).held
    assert held["optimizer"] == held["gradients"] == held["unreduced"] == held["saved"] == 0
    assert held["parameters"] > 0


def test_top_k_and_temperature():
    logits = np.array([0.0, 3.0, 1.0, 3.0, 2.0])
    draws = np.linspace(0, 1, 200, endpoint=False)
    assert {choose(logits, d, 1.0, 2) for d in draws} == {1, 3}
    assert {choose(logits, d, 1.0, 1) for d in draws} == {1}
    assert {choose(logits, d, 1.0, 0) for d in draws} == {0, 1, 2, 3, 4}
    assert {choose(logits, d, 0.0, 0) for d in draws} == {1}
    share = np.mean([choose(logits, d, 1.0, 3) == 4 for d in draws])
    assert share == pytest.approx(np.exp(2) / (np.exp(2) + 2 * np.exp(3)), abs=0.01)
    assert {choose(logits, d, 1e-6, 0) for d in draws} == {1, 3}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("model_type", "llama", "model_type is 'llama'"),
        ("activation_function", "relu", "activation_function is 'relu'"),
        ("layer_norm_epsilon", 1e-6, "layer_norm_epsilon is 1e-06"),
        ("scale_attn_by_inverse_layer_idx", True, "scale_attn_by_inverse_layer_idx is True"),
        ("n_inner", 100, "n_inner is 100; this GPT-2 has 4 times n_embd, 128"),
        ("n_layer", "2", "n_layer is '2'; it must be a whole number"),
        ("n_head", None, "n_head is None"),
        ("n_embd", 0, "n_embd is 0"),
        ("n_layer", 10_001, "n_layer is 10001; it must be a whole number in 1 .. 10000"),
        ("n_embd", 10**18, r"n_embd is 10+; it must be a whole number in 1 .. 100000000$"),
        ("n_head", 100_000_001, r"n_head is 100000001; .* in 1 .. 100000000$"),
        ("n_positions", 10**4000, r"n_positions is 10+\.\.\.0+; .* in 1 .. 100000000$"),
        ("vocab_size", 2**63, "vocab_size is 9223372036854775808; .* in 1 .. 100000000$"),
    ],
)
def test_another_kind_of_model_is_refused(run, tmp_path, key, value, told):
    checkpoint = run / "checkpoints" / "step-00000003"
    config = json.loads((checkpoint / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    with pytest.raises(ConfigError, match=told):
        text(tmp_path)


def changed(folder, key, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


def test_a_configuration_that_was_changed_is_refused(run, tmp_path):
    """Heads do not show in the shapes of tensors: the text could be another, without a sign."""
    checkpoint = shutil.copytree(run / "checkpoints" / "step-00000003", tmp_path / "copy")
    changed(checkpoint, "n_head", 1)
    with pytest.raises(ConfigError, match=r"config\.json: is damaged or was changed \(its digest is .*copy it again"):
        text(checkpoint, 2)
    settings = load(None, "tiny", [*TINY, f"model.init_from={checkpoint}", "model.heads=1"])
    with pytest.raises(ConfigError, match=r"config\.json: is damaged or was changed"):
        check_weights(settings.model)
    (checkpoint / "manifest.json").unlink()  # a directory of somebody else
    assert len(text(checkpoint)) == 20
    check_weights(settings.model)


def test_a_configuration_that_was_not_saved_with_the_checkpoint(run, tmp_path):
    save(alone(), tmp_path / "x", configuration={})
    (tmp_path / "x" / "config.json").write_bytes((run / "checkpoints/step-00000003/config.json").read_bytes())
    with pytest.raises(
        CheckpointError, match=r"config\.json: was not saved with the checkpoint, and manifest\.json does"
    ):
        public_sizes(tmp_path / "x" / "config.json")


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_configuration_that_is_no_file(run, tmp_path, kind):
    unreadable(tmp_path / "config.json", kind)
    with pytest.raises(CheckpointError, match=r"config\.json: is no regular file; "):
        public_sizes(tmp_path / "config.json")
    settings = load(None, "tiny", [*TINY, f"model.init_from={tmp_path}"])
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config\.json: is no regular file; "):
        check_weights(settings.model)


def test_sizes_survive_the_public_configuration():
    for sizes in (Gpt2(2, 8, 2, 5, 11), Gpt2(3, 12, 4, 7, 50257, gelu_tanh=False, positions=9)):
        back = sizes_from(public_config(sizes), "x")
        positions = sizes.positions or sizes.sequence
        assert (back.layers, back.width, back.heads, back.vocabulary) == (
            sizes.layers, sizes.width, sizes.heads, sizes.vocabulary,
        )  # fmt: skip
        assert (back.sequence, back.positions, back.gelu_tanh) == (positions, positions, sizes.gelu_tanh)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"text": ""}, "the prompt is empty"),
        ({"text": None, "numbers": (1, 256)}, "holds token 256"),
        ({"text": None, "numbers": ()}, "the prompt is empty"),
    ],
)
def test_prompts_that_cannot_be(run, changes, told):
    with pytest.raises(ConfigError, match=told):
        text(run, **changes)


def test_ranks_that_are_asked_other_things_are_told(run):
    def main(comm):
        with pytest.raises(ConfigError, match="rank 1 has Request"):
            generate(run, request(seed=comm.rank), comm, lambda token: None)

    run_threads(2, main)
