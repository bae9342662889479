"""Weights exchanged with Hugging Face's transformers: the same logits, and bit-equal values, in both directions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from mpishard.array.numpy_ops import NumpyOps
from mpishard.checkpoint import load_weights, save
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run
from mpishard.models.gpt2 import Gpt2, gpt2, public_config
from mpishard.optim.adamw import AdamW
from mpishard.shard.engine import Engine
from mpishard.shard.schedule import Settings
from tests.models.engine_access import named

#: largest error of a logit relative to the largest logit; 8e-7 was the worst when this was written
LOGITS = 1e-4
SIZES = Gpt2(layers=2, width=24, heads=3, sequence=19, vocabulary=61, attention_block=8, positions=32)
PROMPTS = [list(range(1, 20)), [7], [60, 0, 59, 3, 3, 3], np.random.default_rng(0).integers(0, 61, 19).tolist()]


def engine_of(comm: Any, sizes: Gpt2 = SIZES, seed: int = 1) -> Engine:
    options: dict[str, Any] = {"micro_batch": 1, "global_batch": 6, "seed": seed}
    return Engine(gpt2(sizes), comm, comm.ops, AdamW(), Settings(), **options)


def alone(sizes: Gpt2 = SIZES, seed: int = 1) -> Engine:
    return engine_of(LocalCommunicator(NumpyOps()), sizes, seed)


@pytest.fixture(scope="module", params=["tanh", "exact"])
def theirs(request: pytest.FixtureRequest) -> tuple[GPT2LMHeadModel, Gpt2]:
    """A model of theirs with values far from the initial ones, and its sizes."""
    sizes = replace(SIZES, gelu_tanh=request.param == "tanh")
    torch.manual_seed(4)
    model = GPT2LMHeadModel(GPT2Config(**public_config(sizes))).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return model, sizes


def compare(model: GPT2LMHeadModel, engine: Engine) -> float:
    """Compare logits after several prompts and at all their positions; return the largest error."""
    worst = 0.0
    for prompt in PROMPTS:
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0].float().numpy()
        sample = np.zeros(engine.model.sample_shape, np.int64)
        sample[: len(prompt)] = prompt
        for position in {0, len(prompt) // 2, len(prompt) - 1}:
            found = engine.predict(sample, position)
            error = float(np.abs(found - want[position]).max() / np.abs(want[position]).max())
            assert error <= LOGITS, f"prompt {prompt}, position {position}: {error:.1e}"
            worst = max(worst, error)
    return worst


def test_their_weights_here(theirs: tuple[GPT2LMHeadModel, Gpt2], tmp_path: Path) -> None:
    model, sizes = theirs
    model.save_pretrained(tmp_path)
    engine = alone(sizes)
    load_weights(engine, tmp_path)
    state = model.state_dict()
    for name, param in named(engine, "param").items():
        assert param.tobytes() == state[f"transformer.{name}"].numpy().tobytes(), name
    compare(model, engine)

    def body(comm: Any) -> str:
        sharded = engine_of(comm, sizes)
        load_weights(sharded, tmp_path / "model.safetensors")
        return sharded.checksum()

    assert run(3, body) == [engine.checksum()] * 3


def test_their_model_without_head(theirs: tuple[GPT2LMHeadModel, Gpt2], tmp_path: Path) -> None:
    """The public GPT-2 files are of this kind: names without prefix."""
    model, sizes = theirs
    model.transformer.save_pretrained(tmp_path)
    engine = alone(sizes)
    load_weights(engine, tmp_path)
    compare(model, engine)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_their_weights_in_sixteen_bits(theirs: tuple[GPT2LMHeadModel, Gpt2], tmp_path: Path, kind: torch.dtype) -> None:
    model, sizes = theirs
    halved = GPT2LMHeadModel(model.config)
    halved.load_state_dict(model.state_dict())
    halved = halved.to(kind)
    halved.save_pretrained(tmp_path)
    engine = alone(sizes)
    load_weights(engine, tmp_path)
    compare(halved.float().eval(), engine)  # fp32 holds the same values


@pytest.mark.parametrize("ranks", [1, 3])
def test_our_checkpoints_there(theirs: tuple[GPT2LMHeadModel, Gpt2], tmp_path: Path, ranks: int) -> None:
    _, sizes = theirs
    path = tmp_path / "step-0"

    def body(comm: Any) -> None:
        engine = engine_of(comm, sizes, seed=9)
        for part in engine.state.values():  # spread, lest every logit be near zero
            for piece in part.pieces:
                part.arrays["param"][piece.offset : piece.end] *= 10
        save(engine, path, configuration={}, beside={"config.json": json.dumps(public_config(sizes))})

    run(ranks, body)
    engine = alone(sizes)
    load_weights(engine, path)
    model, told = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert type(model) is GPT2LMHeadModel
    assert not any(told.values()), told
    assert model.config.n_positions == 32
    state = model.state_dict()
    for name, param in named(engine, "param").items():
        assert state[f"transformer.{name}"].numpy().tobytes() == param.tobytes(), name
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    compare(model.eval(), engine)
