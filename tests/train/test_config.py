import os
from typing import get_args

import pytest
from pydantic import ValidationError

from mpishard.errors import ConfigError
from mpishard.shard.schedule import ALIASES, STRATEGIES
from mpishard.train.config import (
    check_ranks,
    dump_toml,
    expectation,
    load,
    sections,
)
from mpishard.train.sections import Config, DataConfig, ModelConfig

KEYS = {
    "model": "layers width heads sequence positions vocabulary dropout gelu attention_block head_chunk init_std"
    " init_from frozen",
    "data": "train heldout epochs",
    "optim": "lr lr_min warmup beta1 beta2 eps decay clip",
    "shard": "strategy group prefetch reshard_after_forward recompute recompute_every accumulate offload",
    "precision": "compute reduce tf32 loss_scale scale scale_every",
    "device": "kind share",
    "train": "steps global_batch micro_batch seed heldout_every heldout_batches log_every sample",
    "checkpoint": "every keep final",
    "comm": "transport algorithm sums share_gathered silence stall",
    "debug": "poison trace",
}


def said(*overrides, **arguments) -> str:
    """Return what load() says of settings that are wrong, after checking that it is one line."""
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides, **arguments)
    message = str(caught.value)
    assert "\n" not in message.replace("\\n", "")
    return message


def test_the_keys_are_pinned():
    assert {name: " ".join(section.model_fields) for name, section in sections().items()} == KEYS


def test_every_key_has_a_description_a_default_and_words_for_what_it_accepts():
    for section in sections().values():
        assert section.__doc__
        for key, field in section.model_fields.items():
            assert field.description, key
            assert not field.is_required(), key
            words = expectation(field)
            assert not {"int", "float", "bool", "str", "Literal"} & set(words.replace(",", "").split()), key


def test_the_configuration_is_frozen():
    with pytest.raises(ValidationError):
        Config().train.steps = 3  # type: ignore[misc]


# --- order of sources


def test_the_later_source_wins(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 7\nseed = 8\n[optim]\nlr = 1\n")
    plain, preset = Config(), load(preset="tiny")
    assert preset.train.steps != plain.train.steps
    config = load(file, "tiny", ["train.seed=9", "train.seed=10"])
    assert config.train.steps == 7
    assert config.train.seed == 10
    assert config.optim.lr == 1.0
    assert config.model == preset.model


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.steps=1_000", "train", "steps", 1000),
        (" train.steps = 5 ", "train", "steps", 5),
        ("optim.lr=1e-3", "optim", "lr", 0.001),
        ("optim.lr=2", "optim", "lr", 2.0),
        ("debug.poison=true", "debug", "poison", True),
        ("shard.strategy=no_shard", "shard", "strategy", "no_shard"),
        ("shard.strategy='no_shard'", "shard", "strategy", "no_shard"),
        ('shard.strategy="no_shard"', "shard", "strategy", "no_shard"),
        ("data.train=", "data", "train", ""),
    ],
)
def test_values_of_set_are_toml_and_bare_text(override, section, key, value):
    found = getattr(getattr(load(overrides=[override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_text_may_hold_equals_signs_and_look_like_anything():
    config = load(overrides=["data.train=/data/a=b.tokens", "data.heldout=2024-data"])
    assert config.data.train == "/data/a=b.tokens"
    assert config.data.heldout == "2024-data"


@pytest.mark.parametrize("name", ["", "tiny", "gpt2-1.5b"])
def test_what_is_dumped_loads_to_the_same(tmp_path, name):
    text = 'a "quoted" \\ tab\t del\x7f é🙂'
    config = load(None, name or None, ["data.train=x", "data.heldout=y", "optim.eps=1e-300", "optim.lr=0.1"])
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": text, "heldout": text})})
    file = tmp_path / "dumped.toml"
    file.write_text(dump_toml(config), encoding="utf-8")
    assert load(file) == config


def test_the_dump_names_every_key():
    text = dump_toml(Config())
    assert [line for line in text.splitlines() if line.startswith("[")] == [f"[{name}]" for name in KEYS]
    assert [line.split(" = ")[0] for line in text.splitlines() if " = " in line] == " ".join(KEYS.values()).split()


# --- what is said of mistakes


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=many", 'train.steps is "many" in --set; it must be a whole number, at least 1'),
        ("train.steps=1.5", "train.steps is 1.5 in --set; it must be a whole number, at least 1"),
        ("train.steps=true", "train.steps is true in --set; it must be a whole number, at least 1"),
        ("train.steps='5'", 'train.steps is "5" in --set; it must be a whole number, at least 1'),
        ("train.steps=0", "train.steps is 0 in --set; it must be a whole number, at least 1"),
        ("train.steps=[1, 2]", "train.steps is [1, 2] in --set; it must be a whole number, at least 1"),
        ("shard.prefetch=-1", "shard.prefetch is -1 in --set; it must be a whole number, at least 0"),
        ("model.dropout=1.0", "model.dropout is 1.0 in --set; it must be a number, at least 0 and below 1"),
        ("optim.lr=nan", "optim.lr is nan in --set; it must be a number, above 0"),
        ("optim.lr=true", "optim.lr is true in --set; it must be a number, above 0"),
        ("debug.poison=yes", 'debug.poison is "yes" in --set; it must be true or false'),
        ("debug.poison=1", "debug.poison is 1 in --set; it must be true or false"),
        ("data.train=5", "data.train is 5 in --set; it must be text"),
        (
            "shard.strategy=full",
            'shard.strategy is "full" in --set; it must be full_shard, shard_grad_op, shard_optimizer, no_shard or '
            "hybrid_shard",
        ),
        ("shard.strategy=3", "shard.strategy is 3 in --set; it must be full_shard, shard_grad_op, shard_optimizer, "
         "no_shard or hybrid_shard"),
        ("shard.group=-1", "shard.group is -1 in --set; it must be a whole number, at least 0 and at most 100000000"),
        (
            "shard.group=2",
            "shard.group is 2 and shard.strategy is full_shard; only hybrid_shard has groups: leave shard.group at 0, "
            "or set shard.strategy to hybrid_shard",
        ),
        (
            "shard.recompute_every=2",
            "shard.recompute_every is 2 and shard.recompute is none; it chooses among blocks: leave it at 1, or set "
            "shard.recompute to block",
        ),
        (
            "shard.recompute_every=0",
            "shard.recompute_every is 0 in --set; it must be a whole number, at least 1 and at most 10000",
        ),
        ("shard.offload=disk", 'shard.offload is "disk" in --set; it must be none or optimizer'),
        ("shard.accumulate=sum", 'shard.accumulate is "sum" in --set; it must be reduce or no_sync'),
        ("precision.compute=fp8", 'precision.compute is "fp8" in --set; it must be fp32, bf16 or fp16'),
        ("precision.reduce=fp64", 'precision.reduce is "fp64" in --set; it must be same, fp32, bf16 or fp16'),
        ("precision.scale=0", "precision.scale is 0.0; it must be a power of two from 2**-24 to 2**64, such as 65536"),
        ("precision.scale=nan", "precision.scale is nan in --set; it must be a number"),
        (
            "precision.scale=1024",
            "precision.scale is 1024.0 and precision.compute is fp32; only fp16 needs a loss scale: leave it at "
            "65536.0, or set precision.compute to fp16",
        ),
        (
            "precision.loss_scale=fixed",
            "precision.loss_scale is fixed and precision.compute is fp32; only fp16 needs a loss scale: leave it at "
            "dynamic, or set precision.compute to fp16",
        ),
        (
            "precision.scale_every=3",
            "precision.scale_every is 3 and precision.compute is fp32; only fp16 needs a loss scale: leave it at 2000, "
            "or set precision.compute to fp16",
        ),
        ("comm.sums=tree", 'comm.sums is "tree" in --set; it must be flat or by_node'),
        (
            "comm.algorithm=star",
            'comm.algorithm is "star" in --set; it must be auto, alltoall, pairwise, ring, native or tree',
        ),
        ("train.steps=1\nseed=2", 'train.steps is "1\\nseed=2" in --set; it must be a whole number, at least 1'),
        (
            "train.setps=3",
            "there is no key train.setps (--set), did you mean train.steps?; 'mpishard train --help' lists all",
        ),
        (
            "train.lr=3",
            "there is no key train.lr (--set), did you mean optim.lr?; 'mpishard train --help' lists all",
        ),
        ("optim.zzz=3", "there is no key optim.zzz (--set); 'mpishard train --help' lists all"),
        (
            "model.warmupp=3",
            "there is no key model.warmupp (--set), did you mean optim.warmup?; 'mpishard train --help' lists all",
        ),
        (
            "trian.steps=3",
            "there is no section [trian] (--set), did you mean train?; "
            "there are model, data, optim, shard, precision, device, train, checkpoint, comm, debug",
        ),
        (
            "model.heads=3",
            "model.width is 128 and model.heads is 3; the width must be a multiple of the heads, so change one of them",
        ),
        (
            "train.micro_batch=5",
            "train.global_batch is 16 and train.micro_batch is 5; "
            "the micro-batch must divide the global batch: use one of 1, 2, 4, 8 or 16",
        ),
        (
            "model.vocabulary=255",
            "model.vocabulary is 255 and the default corpus is of bytes; "
            "set model.vocabulary to at least 256, or data.train and data.heldout to files of your own",
        ),
        (
            "data.heldout=x",
            "data.heldout is set and data.train is empty; name both files "
            "('mpishard data build' makes both), or neither for the default corpus",
        ),
    ],
)
def test_a_wrong_setting_is_told_in_one_line(override, message):
    assert said(override) == message


@pytest.mark.parametrize("override", ["train.steps", "steps=3", "=3", ".steps=3", "train.=3", ""])
def test_an_override_that_is_no_setting_is_shown_how(override):
    assert said(override) == f"--set {override} cannot be read; it must be section.key=value, as in train.steps=100"


def test_several_wrong_settings_are_counted():
    assert said("train.steps=0", "train.seed=-1", "debug.poison=2").endswith("at least 1; 2 more settings are wrong")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["shard.strategy=no_shard", "shard.reshard_after_forward=false"],
            "shard.reshard_after_forward is false and shard.strategy is no_shard, which gathers nothing for a forward; "
            "leave it at true, or set shard.strategy to full_shard",
        ),
        (
            ["shard.recompute=attention", "shard.recompute_every=2"],
            "shard.recompute_every is 2 and shard.recompute is attention; it chooses among blocks: leave it at 1, or "
            "set shard.recompute to block",
        ),
        (
            ["comm.algorithm=ring", "comm.transport=staged"],
            "comm.algorithm is ring and comm.transport is staged; only transport mpi has a choice: leave "
            "comm.algorithm at auto, or set comm.transport to mpi",
        ),
        (
            ["comm.algorithm=native", "precision.compute=bf16"],
            "comm.algorithm is native and gradients travel as bf16; MPI's own sums are of fp32: set precision.reduce "
            "to fp32, or leave comm.algorithm at auto",
        ),
        (
            ["comm.algorithm=native", "comm.sums=by_node"],
            "comm.algorithm is native, which adds up in its own order, and comm.sums is by_node; leave comm.sums at "
            "flat, or comm.algorithm at auto",
        ),
        (
            ["shard.strategy=hybrid_shard", "comm.sums=by_node"],
            "comm.sums is by_node and shard.strategy is hybrid_shard, which adds up by its groups anyway; leave "
            "comm.sums at flat",
        ),
        (
            ["shard.offload=optimizer", "device.kind=cpu"],
            "shard.offload is optimizer and device.kind is cpu, where all memory is the host's; leave shard.offload "
            "at none, or compute on a GPU",
        ),
        (
            ["precision.compute=fp16", "precision.scale=3"],
            "precision.scale is 3.0; it must be a power of two from 2**-24 to 2**64, such as 65536",
        ),
        (
            ["precision.compute=fp16", "precision.loss_scale=fixed", "precision.scale=0"],
            "precision.scale is 0.0; it must be a power of two from 2**-24 to 2**64, such as 65536",
        ),
        (
            ["precision.compute=fp16", "precision.loss_scale=fixed", "precision.scale_every=3"],
            "precision.scale_every is 3 and precision.loss_scale is fixed; a fixed scale never moves: leave "
            "scale_every at 2000, or set precision.loss_scale to dynamic",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_told_in_one_line(overrides, message):
    assert said(*overrides) == message


@pytest.mark.parametrize(
    "overrides",
    [
        ["shard.strategy=hybrid_shard", "shard.group=4", "shard.reshard_after_forward=false"],
        ["shard.reshard_after_forward=false"],
        ["shard.recompute=block", "shard.recompute_every=3"],
        ["shard.accumulate=no_sync", "shard.strategy=ddp"],
        ["precision.compute=fp16", "precision.loss_scale=fixed", "precision.scale=1"],
        ["precision.reduce=fp16", "precision.scale=8", "precision.scale_every=100"],
        ["shard.offload=optimizer"],
    ],
)
def test_settings_that_fit_together(overrides):
    load(overrides=overrides)


@pytest.mark.parametrize(("alias", "name"), sorted(ALIASES.items()))
def test_a_strategy_by_another_name_has_its_own(tmp_path, alias, name):
    config = load(overrides=[f"shard.strategy={alias}"])
    assert config.shard.strategy == name
    assert f'strategy = "{name}"' in dump_toml(config)
    assert config == load(overrides=[f"shard.strategy={name}"])


def test_the_strategies_are_the_engines():
    (choices,) = [get_args(sections()["shard"].model_fields["strategy"].annotation)]
    assert choices == STRATEGIES


def test_a_vocabulary_of_ones_own_may_be_small():
    assert load(overrides=["model.vocabulary=5", "data.train=x", "data.heldout=y"]).model.vocabulary == 5


def test_the_file_is_named_in_what_is_said_of_it(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[train]\nsteps = 'x'\n")
    assert said(config_file=file) == f'train.steps is "x" in {file}; it must be a whole number, at least 1'
    file.write_text("[train]\nstep = 3\n")
    assert said(config_file=file).startswith(f"there is no key train.step ({file}), did you mean train.steps?")
    file.write_text("train = 3\n")
    assert said(config_file=file) == f"train is 3 in {file}; it must be a section, [train]"
    file.write_text("[train\n")
    assert said(config_file=file).startswith(f"{file}: is no TOML (")
    file.write_bytes(b"\xff")
    assert said(config_file=file) == f"{file}: is not UTF-8 text; name a TOML file with --config"
    assert said(config_file=tmp_path / "no.toml").startswith(f"{tmp_path / 'no.toml'}: cannot be read (No such file")
    assert "cannot be read" in said(config_file=tmp_path)


def test_an_unknown_preset_is_named_with_the_known_ones():
    assert said(preset="dmeo") == (
        "there is no preset 'dmeo', did you mean demo?; "
        "there are demo, gpt-7b, gpt2-1.5b, gpt2-124m, gpt2-355m, gpt2-774m, gpt3-175b, tiny"
    )


def test_a_section_made_by_hand_is_checked_too():
    with pytest.raises(ConfigError, match=r"model\.width is 10"):
        ModelConfig(width=10, heads=4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
def test_ranks_that_divide_the_micro_batches_pass(size):
    check_ranks(load(overrides=["train.global_batch=24", "train.micro_batch=2"]), size)


@pytest.mark.parametrize("size", [5, 8, 24])
def test_ranks_that_do_not_divide_the_micro_batches_are_told_what_does(size):
    config = load(overrides=["train.global_batch=24", "train.micro_batch=2"])
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, size)
    assert str(caught.value) == (
        "12 micro-batches a step (train.global_batch 24 / train.micro_batch 2) cannot be dealt evenly "
        f"to {size} ranks; use 1, 2, 3, 4, 6 or 12 ranks, or change the batches"
    )


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000], ids=["digits", "brackets"])
def test_what_toml_cannot_hold_is_text(value):
    assert "it must be a whole number" in said(f"train.steps={value}")


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    (tmp_path / "a.toml").write_text("[train]\nsteps = 3\n", encoding="utf-8-sig")
    assert load(tmp_path / "a.toml").train.steps == 3


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in said(config_file=tmp_path / "pipe")


def test_divisors_of_large_numbers_are_found_at_once_and_not_all_shown():
    told = said("train.global_batch=7207200", "train.micro_batch=11000")
    assert told.endswith("use one of 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... or 7207200")


@pytest.mark.parametrize("path", ["a\0b", "\udcff.tokens"])
def test_a_path_that_cannot_be_written_down_is_refused(path):
    with pytest.raises(ConfigError, match="a path in UTF-8"):
        DataConfig(train=path, heldout="x")
