"""What users get wrong, on one rank and on two: one line, exit code 2 everywhere, nothing written or lost.

A case prepares files in a folder and returns the program's arguments; the line must hold some words.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.cli.bad_cases import Cases
from tests.cli.small_runs import finished, tokens, training, weights

CASES = Cases()
case = CASES.add


def configured(folder, text: str) -> list[str]:
    (folder / "my.toml").write_text(text)
    return ["train", "--config", str(folder / "my.toml"), "--run-dir", str(folder / "run")]


# --- settings


@case("there is no key train.stepz", "did you mean train.steps?")
def a_misspelt_key(folder):
    return training(folder, "train.stepz=3")


@case("there is no section [trian]", "did you mean train?", "my.toml")
def a_misspelt_section(folder):
    return configured(folder, "[trian]\nsteps = 3\n")


@case("there is no key model.depth", "mpishard train --help")
def an_unknown_key(folder):
    return training(folder, "model.depth=3")


@case('train.steps is "many" in --set', "a whole number, at least 1")
def a_wrong_type(folder):
    return training(folder, "train.steps=many")


@case("model.width is 2.5 in", "a whole number")
def a_fraction_of_a_feature(folder):
    return configured(folder, "[model]\nwidth = 2.5\n")


@case("model.layers is -1", "at least 1")
def a_negative_size(folder):
    return training(folder, "model.layers=-1")


@case("train.micro_batch is 0", "at least 1")
def a_zero_size(folder):
    return training(folder, "train.micro_batch=0")


@case("model.width is 6 and model.heads is 4", "multiple of the heads")
def heads_that_do_not_divide_the_width(folder):
    return training(folder, "model.heads=4")


@case("model.sequence is 9 and model.positions is 8", "lower model.sequence")
def a_sequence_longer_than_the_positions(folder):
    return training(folder, "model.positions=8")


@case("train.global_batch is 4 and train.micro_batch is 3", "1, 2 or 4")
def a_micro_batch_that_does_not_divide(folder):
    return training(folder, "train.micro_batch=3")


@case("my.toml", "line 2, column 9", "is no TOML")
def broken_toml(folder):
    return configured(folder, "[train]\nsteps = = 3\n")


@case("missing.toml", "cannot be read", "No such file")
def a_missing_configuration(folder):
    return ["train", "--config", str(folder / "missing.toml"), "--run-dir", str(folder / "run")]


@case("cannot be read", "Is a directory", "--config")
def a_directory_as_configuration(folder):
    return ["train", "--config", str(folder), "--run-dir", str(folder / "run")]


@case("there is no preset 'gpt3'", "tiny")
def an_unknown_preset(folder):
    return ["train", "--preset", "gpt3", "--run-dir", str(folder / "run")]


# --- data


@case("holds 361 tokens", "smaller train.global_batch or model.sequence")
def a_sequence_longer_than_the_data(folder):
    return training(folder, "model.sequence=400")


@case("vocabulary is 29, the model's is 20", "model.vocabulary to at least 29")
def a_vocabulary_smaller_than_the_largest_token(folder):
    return training(folder, "model.vocabulary=20")


@case("nowhere.tokens", "cannot be read", "mpishard data build")
def a_missing_token_file(folder):
    return training(folder, train=folder / "nowhere.tokens")


@case("holds 0 bytes", "mpishard data build")
def an_empty_token_file(folder):
    path = folder / "empty.tokens"
    path.write_bytes(b"")
    return training(folder, train=path)


@case("holds 400 bytes, its header says 425", "cut short")
def a_truncated_token_file(folder):
    path = tokens(folder)
    path.write_bytes(path.read_bytes()[:400])
    return training(folder, train=path)


@case("checksum", "damaged", "build it again")
def a_corrupt_token_file(folder):
    path = tokens(folder)
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    return training(folder, train=path)


@case("its header says 3 bytes per token", "1, 2 or 4")
def a_token_file_of_another_type(folder):
    path = tokens(folder)
    data = bytearray(path.read_bytes())
    data[12] = 3
    path.write_bytes(data)
    return training(folder, train=path)


@case("is no token file", "NUMPY", "mpishard data build")
def a_file_of_another_format(folder):
    np.save(folder / "tokens.npy", np.arange(500))
    return training(folder, train=folder / "tokens.npy")


@case("holes.txt", "UTF-8")
def text_that_is_not_text(folder):
    (folder / "holes.txt").write_bytes(b"text \xff\xfe" * 50)
    return ["data", "build", "--source", str(folder / "holes.txt"), "--out", str(folder / "run")]


# --- places


@case("already holds a run (config.toml)", "--resume")
def a_directory_that_holds_a_run(folder):
    (folder / "run").mkdir()
    (folder / "run" / "config.toml").write_text("[train]\n")
    return training(folder)


@case("cannot be made", "--run-dir")
def a_place_without_permission(folder):
    return [*training(folder)[:-1], "/sys/mpishard-run"]


@case("cannot be made", "--run-dir")
def a_file_as_run_directory(folder):
    (folder / "run").write_text("mine")
    return training(folder)


# --- weights and checkpoints


@case("h.0.ln_1.weight", "NaN")
def a_nan_in_the_initial_weights(folder):
    bad = np.array([1, np.nan, 1, 1, 1, 1], np.float32)
    return [*training(folder), "--init-from", str(weights(folder, **{"h.0.ln_1.weight": bad}))]


@case("missing", "h.0.ln_1.bias")
def weights_without_a_tensor(folder):
    return [*training(folder), "--init-from", str(weights(folder, **{"h.0.ln_1.bias": None}))]


@case("spare.weight")
def weights_with_a_tensor_too_many(folder):
    return [*training(folder), "--init-from", str(weights(folder, **{"spare.weight": np.zeros(3, np.float32)}))]


@case("wte.weight", "(29, 6)", "(31, 6)")
def weights_of_another_vocabulary(folder):
    other = np.zeros((31, 6), np.float32)
    return [*training(folder), "--init-from", str(weights(folder, **{"wte.weight": other}))]


@case("config.json", "set model.heads=3 (not 2), model.gelu=", "exact")
def weights_of_other_heads(folder):
    from mpishard.models.gpt2 import Gpt2, public_config

    path = weights(folder)
    sizes = Gpt2(layers=1, width=6, heads=3, sequence=9, vocabulary=29, gelu_tanh=False)
    path.with_name("config.json").write_text(json.dumps(public_config(sizes)))
    return [*training(folder), "--init-from", str(path)]


@case("config.json", "activation_function is 'relu'")
def weights_of_another_kind(folder):
    path = weights(folder)
    path.with_name("config.json").write_text('{"model_type": "gpt2", "activation_function": "relu"}')
    return [*training(folder), "--init-from", str(folder)]


@case("pytorch_model.bin", "save the weights as model.safetensors")
def weights_as_a_pickle(folder):
    (folder / "w").mkdir()
    (folder / "w" / "pytorch_model.bin").write_bytes(b"x")
    return [*training(folder), "--init-from", str(folder / "w")]


@case("nowhere.safetensors", "cannot be read")
def weights_that_are_missing(folder):
    return [*training(folder), "--init-from", str(folder / "nowhere.safetensors")]


@case("model.safetensors")
def weights_that_are_no_safetensors(folder):
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(500))
    return [*training(folder), "--init-from", str(folder / "model.safetensors")]


@case("wte.weight", "(29, 6)", "(29, 8)")
def a_checkpoint_of_another_model(folder):
    return ["train", "--resume", str(finished(folder)), "--set", "model.width=8", "--set", "train.steps=9"]


@case("has done 2 steps", "set train.steps higher")
def a_run_that_has_ended(folder):
    return ["train", "--resume", str(finished(folder))]


@case("train.seed is 5", "--init-from")
def another_order_of_the_data(folder):
    return ["train", "--resume", str(finished(folder)), "--set", "train.seed=5", "--set", "train.steps=9"]


@case("is not the training file of the checkpoint")
def another_training_file(folder):
    run = finished(folder)
    other = tokens(folder, "other", 41)
    return ["train", "--resume", str(run), "--set", f"data.train={other}", "--set", "train.steps=9"]


@case("manifest.json", "cannot be read")
def a_checkpoint_that_is_missing(folder):
    return ["train", "--resume", str(folder / "nowhere")]


@case("holds no complete checkpoint")
def a_run_without_a_checkpoint(folder):
    (folder / "run" / "checkpoints" / ".step-00000002.tmp").mkdir(parents=True)
    return ["train", "--resume", str(folder / "run")]


@case("manifest.json")
def a_damaged_manifest(folder):
    run = finished(folder)
    (run / "checkpoints" / "step-00000002" / "manifest.json").write_text("{")
    return ["train", "--resume", str(run), "--set", "train.steps=9"]


@case("model.safetensors", "byte 44")
def a_truncated_checkpoint(folder):
    run = finished(folder)
    path = run / "checkpoints" / "step-00000002" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    return ["train", "--resume", str(run), "--set", "train.steps=9"]


# --- generate


@case("give the prompt as numbers", "--prompt-tokens")
def text_for_a_model_of_other_tokens(folder):
    return ["generate", "--from", str(finished(folder)), "--prompt", "x"]


@case("the prompt holds token 29", "0 .. 28")
def a_token_that_the_model_does_not_know(folder):
    return ["generate", "--from", str(finished(folder)), "--prompt-tokens", "3 29"]


@case("--prompt-tokens holds 'x'", "whole numbers")
def a_token_that_is_no_number(folder):
    return ["generate", "--from", str(folder), "--prompt-tokens", "3 x"]


@case("holds no config.json", "name a run directory")
def text_from_a_directory_without_a_model(folder):
    return ["generate", "--from", str(folder), "--prompt", "x"]


@case("one of --prompt and --prompt-tokens is needed")
def no_prompt(folder):
    return ["generate", "--from", str(folder)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_code_2_and_nothing_lost(tmp_path, name, ranks):
    CASES.check(name, tmp_path, ranks)
