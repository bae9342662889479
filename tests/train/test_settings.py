"""What a configuration says to the engine, and how its ranks stand together."""

from __future__ import annotations

import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.comm.local import LocalCommunicator
from mpishard.comm.threads import run as run_threads
from mpishard.errors import ConfigError
from mpishard.optim import LossScale
from mpishard.shard.schedule import Settings
from mpishard.train.config import load
from mpishard.train.model import build_model
from mpishard.train.prepare import prepare
from mpishard.train.settings import Places, loss_scale_of, places_of, settings_of, types_of

HYBRID = "shard.strategy=hybrid_shard"


def places(*overrides: str, ranks: int = 4, **more: bool) -> Places:
    """What rank 0 of threads, which are one node, is told."""
    return run_threads(ranks, lambda comm: places_of(load(overrides=overrides), comm, **more))[0]


def test_groups_and_brackets() -> None:
    assert places() == Places(0, 1)
    assert places(HYBRID, "shard.group=2") == Places(2, 1)
    assert places(HYBRID) == Places(4, 1)
    assert places("comm.sums=by_node") == Places(0, 4)
    with pytest.raises(ConfigError, match=r"^shard\.group is 3 and does not divide 4 ranks; set shard\.group to 1, 2"):
        places(HYBRID, "shard.group=3")


def test_a_run_sets_the_bracket_before_anything_is_bound() -> None:
    def main(comm):
        prepared = prepare(load(overrides=["comm.sums=by_node"]), comm)
        assert prepared.settings.micros == 2
        return comm.bracket

    assert run_threads(2, main) == [2, 2]


def test_alone_nodes_are_what_the_communicator_was_told() -> None:
    from mpishard.comm.alone import AloneCommunicator

    comm = AloneCommunicator(5, 8, NumpyOps(), local_size=2)
    assert places_of(load(overrides=[HYBRID]), comm, alone=True) == Places(2, 1)
    assert places_of(load(overrides=["comm.sums=by_node"]), comm, alone=True) == Places(0, 2)


def test_settings_reach_the_schedule() -> None:
    assert settings_of(load(), 3) == Settings(micros=3)
    config = load(
        overrides=[
            "shard.strategy=zero3", "shard.prefetch=2", "shard.recompute=block", "shard.recompute_every=4",
            "shard.reshard_after_forward=false", "shard.accumulate=no_sync",
        ]
    )  # fmt: skip
    assert settings_of(config, 3) == Settings("full_shard", 2, "block", 3, 4, False, "no_sync")
    assert settings_of(load(overrides=[HYBRID, "shard.group=2"]), 1).group == 2
    assert settings_of(load(overrides=[HYBRID]), 1, 8).group == 8


def test_attention_is_recomputed_by_the_layer() -> None:
    config = load(overrides=["shard.recompute=attention"])
    assert settings_of(config, 1).recompute == "none"
    kept = {
        recompute: prepare(load(overrides=[f"shard.recompute={recompute}"]), LocalCommunicator(NumpyOps()))
        for recompute in ("none", "attention", "block")
    }
    saved = {recompute: each.forecast.held["saved"] for recompute, each in kept.items()}
    assert saved["block"] < saved["attention"] < saved["none"]


def test_types_and_loss_scales() -> None:
    found = {}
    for compute in ("fp32", "bf16", "fp16"):
        for reduce in ("same", "fp32", "bf16", "fp16"):
            precision = load(overrides=[f"precision.compute={compute}", f"precision.reduce={reduce}"]).precision
            found[compute, reduce] = (*types_of(precision), loss_scale_of(precision) is not None)
    assert found["fp32", "same"] == ("float32", "", False)
    assert found["bf16", "fp32"] == ("bfloat16", "float32", False)
    assert found["fp16", "bf16"] == ("float16", "bfloat16", True)
    assert found["fp32", "fp16"] == ("float32", "float16", True)
    overrides = ["precision.compute=fp16", "precision.scale=8", "precision.loss_scale=fixed"]
    assert repr(loss_scale_of(load(overrides=overrides).precision)) == repr(LossScale(8.0, dynamic=False))
    overrides = ["precision.compute=fp16", "precision.scale_every=7"]
    assert repr(loss_scale_of(load(overrides=overrides).precision)) == repr(LossScale(every=7))


def test_frozen_parameters_are_named_by_patterns() -> None:
    model = build_model(load(overrides=["model.frozen= wte.*,, h.[01].attn.* ,"]).model)
    frozen = {unit.prefix + spec.name for unit in model.units for spec in unit.specs if not spec.trainable}
    assert "wte.weight" in frozen
    assert {name.split(".")[1] for name in frozen if name.startswith("h.")} == {"0", "1"}
    assert all(".attn." in name for name in frozen if name.startswith("h."))
    assert all(spec.trainable for unit in build_model(load().model).units for spec in unit.specs)
