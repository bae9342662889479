"""Files of weights that other tools have written: names, types, second copies, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mpishard.checkpoint import load_weights, save
from mpishard.comm.threads import run
from mpishard.errors import CheckpointError
from tests.checkpoint.runs import BASE, alone, saved_alone
from tests.models.engine_access import named
from tests.shard.training import SMALL, Job, train

Arrays = dict[str, np.ndarray]


def values(prefix: str = "transformer.") -> Arrays:
    """Values unlike the initial ones, with a public file's names."""
    draw = np.random.default_rng(3)
    shapes = {name: value.shape for name, value in named(alone(), "param").items()}
    return {prefix + name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(path: Path, arrays: Arrays, kind: str = "F32") -> Path:
    """Write a file as BF16, which NumPy has no name for, or through the public package."""
    if kind != "BF16":
        types = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
        save_file({name: array.astype(types[kind]) for name, array in arrays.items()}, path)
        return path
    halves = {name: (array.view(np.uint32) >> 16).astype(np.uint16) for name, array in arrays.items()}
    save_file(halves, path)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"U16"', b'"BF16"').rstrip()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return path


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    if kind == "BF16":
        return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return array.astype(np.float16).astype(np.float32) if kind == "F16" else array


def checksum(path: Path, ranks: int = 1, job: Job = BASE, **changes: Any) -> str:
    """The checksum after the weights were read, which is the same on all ranks."""

    def body(comm: Any) -> str:
        engine = job.engine(comm, **changes)
        load_weights(engine, path)
        return engine.checksum()

    (found,) = set(run(ranks, body))
    return found


def refusal(path: Path, arrays: Arrays | None = None, kind: str = "F32", **changes: Any) -> str:
    """The one message of three ranks."""
    if arrays is not None:
        write(path, arrays, kind)

    def body(comm: Any) -> str:
        with pytest.raises(CheckpointError) as error:
            load_weights(BASE.engine(comm, **changes), path)
        return str(error.value)

    (message,) = set(run(3, body))
    assert "\n" not in message
    return message.replace(str(path), "HERE")


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("prefix", ["transformer.", ""], ids=["with prefix", "without"])
def test_names_and_types(tmp_path: Path, kind: str, prefix: str) -> None:
    arrays = values(prefix)
    path = write(tmp_path / "w.safetensors", arrays, kind)
    engine = alone()
    load_weights(engine, path)
    for name, param in named(engine, "param").items():
        assert param.tobytes() == rounded(arrays[prefix + name], kind).tobytes(), name
    for array in ("exp_avg", "exp_avg_sq"):
        assert not any(moment.any() for moment in named(engine, array).values())
    assert (engine.steps, engine.updates) == (0, 0)
    assert checksum(path, 3) == checksum(path, 4) == engine.checksum()
    assert checksum(path, 2, BASE.with_settings(strategy="no_shard")) == engine.checksum()


@pytest.mark.parametrize("kind", ["F64", "F32", "BF16"])
def test_a_wider_engine(tmp_path: Path, kind: str) -> None:
    arrays = values()
    path = write(tmp_path / "w", arrays, kind)
    engine = alone(dtype_name="float64")
    load_weights(engine, path)
    for name, param in named(engine, "param").items():
        assert np.array_equal(param, rounded(arrays[f"transformer.{name}"], kind).astype(np.float64))
    assert checksum(path, 3, dtype_name="float64") == engine.checksum()


def test_training_goes_on_alike_on_any_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "w", values())

    def body(comm: Any) -> object:
        engine = BASE.engine(comm)
        load_weights(engine, path)
        return train(engine, BASE, 2)

    assert len({outcome for ranks in (1, 3) for outcome in run(ranks, body)}) == 1


def test_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", values())
    assert checksum(tmp_path, 2) == checksum(tmp_path / "model.safetensors")


def test_a_checkpoint_of_our_own(tmp_path: Path) -> None:
    engine = alone(optimizer=None, seed=8)
    save(engine, tmp_path / "x", configuration={})
    assert checksum(tmp_path / "x", 2, optimizer=None) == engine.checksum()


def test_masks_and_tied_heads(tmp_path: Path) -> None:
    arrays = values()
    plain = checksum(write(tmp_path / "plain", arrays))
    for layer in range(SMALL.layers):
        arrays[f"transformer.h.{layer}.attn.bias"] = np.tril(np.ones((1, 1, 7, 7), np.float32))
        arrays[f"transformer.h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
    arrays["lm_head.weight"] = arrays["transformer.wte.weight"].copy()
    for ranks in (1, 3):
        assert checksum(write(tmp_path / "more", arrays), ranks) == plain


@pytest.mark.parametrize("element", [0, 434])
def test_a_head_of_its_own(tmp_path: Path, element: int) -> None:
    arrays = values()
    head = arrays["lm_head.weight"] = arrays["transformer.wte.weight"].copy()
    head.reshape(-1).view(np.uint32)[element] ^= 1
    assert refusal(tmp_path / "w", arrays) == (
        "HERE: lm_head.weight is not bit for bit transformer.wte.weight, to which this model ties it; "
        "take weights of a model with tied embeddings"
    )
    arrays["lm_head.weight"] = head[:-1]
    assert "lm_head.weight is not bit for bit" in refusal(tmp_path / "w", arrays)


@pytest.mark.parametrize(
    ("name", "element", "value", "kind"),
    [
        ("wte.weight", 0, np.nan, "F32"),
        ("h.3.mlp.c_proj.bias", 14, -np.inf, "F32"),
        ("h.2.ln_2.bias", 3, np.nan, "BF16"),
        ("wte.weight", 434, np.inf, "F16"),
    ],
)
def test_what_is_not_finite(tmp_path: Path, value: float, name: str, element: int, kind: str) -> None:
    arrays = values()
    arrays[f"transformer.{name}"].reshape(-1)[element] = value
    message = refusal(tmp_path / "w", arrays, kind)
    assert message == f"HERE: transformer.{name} holds NaN or infinity; take other weights"


def test_other_tensors(tmp_path: Path) -> None:
    arrays = values()
    arrays["score.weight"] = arrays.pop("transformer.h.1.ln_1.bias")
    arrays["transformer.ln_f.bias"] = np.zeros((3, 5), np.float32)
    assert refusal(tmp_path / "w", arrays) == (
        "HERE: holds another model (missing: transformer.h.1.ln_1.bias; unknown: score.weight; "
        "of another shape: transformer.ln_f.bias (3, 5) not (15,)); give the sizes of the model that was saved"
    )


def test_a_tensor_under_both_names(tmp_path: Path) -> None:
    arrays = values()
    arrays["ln_f.bias"] = arrays["transformer.ln_f.bias"].copy()
    assert refusal(tmp_path / "w", arrays) == ("HERE: holds both ln_f.bias and transformer.ln_f.bias; keep one of them")


def test_a_type_that_would_be_rounded(tmp_path: Path) -> None:
    message = refusal(tmp_path / "w", values(), "F64")
    assert message.startswith("HERE: transformer.")
    assert "transformer.h.0.attn.c_attn.bias F64, " in message
    assert message.endswith(" and 47 more cannot become float32 exactly; convert to F32 or F16 or BF16")


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no").startswith("HERE: cannot be read by rank 0 on ")
    (tmp_path / "pickle").write_bytes(b"\x80\x02}q\x00.")
    assert "is no whole safetensors file (it holds 6 bytes)" in refusal(tmp_path / "pickle")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({}))
    assert refusal(tmp_path) == "HERE: holds weights in several files; join them in one model.safetensors"


def test_weights_of_a_checkpoint_of_ours_are_compared_with_its_manifest(tmp_path: Path) -> None:
    engine = saved_alone(tmp_path / "x")
    assert checksum(tmp_path / "x", 3, optimizer=None) == checksum(tmp_path / "x" / "model.safetensors", optimizer=None)
    path = tmp_path / "x" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)
    last = engine.model.units[-1]
    with pytest.raises(CheckpointError, match=f"model.safetensors: is damaged .*{last.prefix}{last.specs[-1].name}"):
        checksum(tmp_path / "x", 2)
    path.rename(tmp_path / "x" / "other.safetensors")  # no longer what the manifest speaks of
    checksum(tmp_path / "x" / "other.safetensors")


def test_large_tensors_are_read_in_parts(tmp_path: Path) -> None:
    """A table larger than what is converted at a time, of which three ranks hold a part; NaN in its last part."""
    sizes = replace(SMALL, vocabulary=9001, layers=0)
    job = replace(BASE, sizes=sizes)
    draw = np.random.default_rng(1)
    arrays = {name: draw.normal(size=p.shape).astype(np.float32) for name, p in named(alone(job), "param").items()}
    arrays["lm_head.weight"] = arrays["wte.weight"].copy()
    path = write(tmp_path / "w", arrays, "BF16")
    engine = alone(job)
    load_weights(engine, path)
    assert named(engine, "param")["wte.weight"].tobytes() == rounded(arrays["wte.weight"], "BF16").tobytes()
    assert checksum(path, 3, job) == engine.checksum()
    arrays["lm_head.weight"].view(np.uint32)[4500, 3] ^= 1 << 20
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not bit for bit wte\.weight"):
        checksum(write(tmp_path / "w", arrays, "BF16"), 3, job)
    arrays["wte.weight"][-1, -1] = np.nan
    with pytest.raises(CheckpointError, match=r"wte\.weight holds NaN or infinity"):
        load_weights(engine, write(tmp_path / "w", arrays, "BF16"))
