"""Settings of strategies, precision and memory that cannot be, on one rank and on two; see test_bad_input.py."""

from __future__ import annotations

import pytest

from tests.cli.bad_cases import Cases
from tests.cli.small_runs import training

CASES = Cases()
case = CASES.add


@case("shard.group is 3 and does not divide", "set shard.group to")
def a_group_that_does_not_divide_the_ranks(folder):
    return training(folder, "shard.strategy=hybrid_shard", "shard.group=3")


@case("shard.group is 2 and shard.strategy is full_shard", "only hybrid_shard has groups")
def a_group_without_hybrid_shard(folder):
    return training(folder, "shard.group=2")


@case('shard.strategy is "zero4" in --set', "full_shard, shard_grad_op, shard_optimizer, no_shard or hybrid_shard")
def a_strategy_that_there_is_not(folder):
    return training(folder, "shard.strategy=zero4")


@case('shard.offload is "disk" in --set', "none or optimizer")
def an_offload_that_there_is_not(folder):
    return training(folder, "shard.offload=disk")


@case("shard.offload is optimizer and device.kind is cpu", "compute on a GPU")
def offload_on_a_cpu(folder):
    return training(folder, "shard.offload=optimizer", "device.kind=cpu")


@case('device.kind is "tpu" in --set', "auto, cpu or cuda")
def a_device_kind_that_there_is_not(folder):
    return training(folder, "device.kind=tpu")


@case("precision.scale is 0.0", "a power of two from 2**-24 to 2**64, such as 65536")
def fp16_with_a_fixed_scale_of_zero(folder):
    return training(folder, "precision.compute=fp16", "precision.loss_scale=fixed", "precision.scale=0")


@case("precision.scale is 1000.0", "a power of two")
def a_scale_that_is_no_power_of_two(folder):
    return training(folder, "precision.compute=fp16", "precision.scale=1000")


@case("precision.scale is 1024.0 and precision.compute is bf16", "only fp16 needs a loss scale")
def a_loss_scale_without_fp16(folder):
    return training(folder, "precision.compute=bf16", "precision.scale=1024")


@case('precision.compute is "fp8" in --set', "fp32, bf16 or fp16")
def a_precision_that_there_is_not(folder):
    return training(folder, "precision.compute=fp8")


@case("shard.recompute_every is 2 and shard.recompute is attention", "set shard.recompute to block")
def every_second_block_of_none(folder):
    return training(folder, "shard.recompute=attention", "shard.recompute_every=2")


@case("shard.reshard_after_forward is false and shard.strategy is no_shard", "leave it at true")
def parameters_kept_that_are_kept_anyway(folder):
    return training(folder, "shard.strategy=ddp", "shard.reshard_after_forward=false")


@case("frozen pattern 'h.7.*' matches no parameter")
def a_frozen_parameter_that_there_is_not(folder):
    return training(folder, "model.frozen=h.7.*")


@case("leave nothing to train")
def everything_frozen(folder):
    return training(folder, "model.frozen=*")


# --- a rank of a larger world


@case("--as-rank is '5'", "as in 5/1024")
def a_rank_of_no_number_of_ranks(folder):
    return [*training(folder), "--as-rank", "5"]


@case("--as-rank is '4/4'", "the ranks of 4 are 0 to 3")
def a_rank_beyond_the_last(folder):
    return [*training(folder), "--as-rank", "4/4"]


@case("--as-rank is '0/0'", "at least 1 and at most 1000000")
def a_rank_of_none(folder):
    return [*training(folder), "--as-rank", "0/0"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_one_line_exit_code_2_and_nothing_lost(tmp_path, name, ranks):
    CASES.check(name, tmp_path, ranks)
