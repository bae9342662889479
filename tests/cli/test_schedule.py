"""mpishard schedule: what it prints, what it refuses, and that it starts nothing."""

import re

import pytest

from mpishard.cli import main
from mpishard.train.config import load, presets
from tests.cli.processes import fresh

THREE_BLOCKS = ["--preset", "tiny", "--set", "model.layers=3", "--set", "train.global_batch=2", "--ranks", "2"]


@pytest.fixture
def call(capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["schedule", *arguments])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


def test_a_step_of_two_ranks(call):
    code, out, err = call(*THREE_BLOCKS)
    assert (code, err) == (0, "")
    head, step, meanings, sums = (part.splitlines() for part in out.strip().split("\n\n"))
    assert head[0] == "step: full_shard, prefetch 1, recompute none, fp32, 2 ranks, 1 micro-batch of 1 sequence a rank"
    # 9280 and 12704 parameters, with holes and padding to 2 x 512 elements
    assert head[1:] == [
        "unit root: 9,280 parameters, 41.0 kB whole, 20.5 kB a shard",
        "units h.0 to h.2: 12,704 parameters each, 53.2 kB whole, 26.6 kB a shard",
    ]
    assert step[0] == "Gather(root) Gather(h.0) Gather(h.1) Await(root)"
    assert step[-1] == "Agree Update(root) Update(h.0) Update(h.1) Update(h.2)"
    assert len(step) == 11
    assert meanings[0].startswith("Gather     start the all-gather of a unit's shards into a buffer")
    root, block = 2 * 5 * 2048, 2 * 13 * 1024
    assert sums == [
        f"a rank sends 127.0 kB ({root + 4 * block:,} bytes) in 5 all-gathers",
        f"a rank sends 100.4 kB ({root + 3 * block:,} bytes) in 4 reduce-scatters",
        "a rank sends 320 B (320 bytes) in 1 record",
        f"gathered at most at once: root, h.0, h.1, {2 * (root + 2 * block) / 1000:.1f} kB",
        "before the list, one record from every rank: that it begins this one too",
    ]


def test_the_settings_shape_the_list(call):
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.strategy=no_shard")
    assert "Gather(" not in out
    assert "nothing is gathered: a rank holds every unit" in out
    assert "in 4 all-gathers of gradients" in out
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.recompute=block")
    assert out.count("Recompute(") == 3
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.prefetch=0")
    assert "Backward(h.2) Release(h.2) Reduce(h.2) Absorb(h.2) Gather(h.1)" in out


FOUR = [*THREE_BLOCKS[:-4], "--set", "train.global_batch=4", "--ranks", "4"]


def test_strategies_that_keep_whole_parameters_gather_them_once(call):
    for strategy in ("shard_optimizer", "zero2"):
        _, out, _ = call(*FOUR, "--set", f"shard.strategy={strategy}", "--set", "shard.prefetch=0")
        assert "Release(" not in out
        assert re.search(r"in 4 all-gathers$", out, flags=re.MULTILINE)
        assert "nothing is gathered into a buffer: a rank holds every unit" in out
    assert out.startswith("step: shard_grad_op, prefetch 0, ")
    # what is reduced and then updated, before the parameters are gathered again
    assert "Absorb(root)\nAgree Update(root) Gather(root)" in out


def test_hybrid_tells_what_goes_inside_a_group_and_across(call):
    code, out, _ = call(*FOUR, "--set", "shard.strategy=hybrid_shard", "--set", "shard.group=2")
    assert code == 0
    assert out.startswith("step: hybrid_shard in groups of 2, prefetch 1, ")
    # 9280 and 12704 parameters, with holes and padding to 4 x 512 elements; a group's shard is half of them
    root, block = 4 * 5 * 2048, 4 * 14 * 1024
    assert f"unit root: 9,280 parameters, {root / 1000:.1f} kB whole, {root / 2000:.1f} kB a shard" in out
    assert f"({(root + 4 * block) // 2:,} bytes) in 5 all-gathers inside its group of 2\n" in out
    assert f"({(root + 3 * block) // 2:,} bytes) in 4 reduce-scatters inside its group of 2\n" in out
    # of its shard, half is sent to be added up and half to be gathered
    assert f"({(root + 3 * block) // 2:,} bytes) in 4 sums of shards across 2 groups\n" in out
    assert "in 1 record\n" in out
    assert "AllReduce  add up" in out


def test_gradients_travel_in_a_type_of_their_own(call):
    sent = {}
    for reduce in ("same", "bf16", "fp16"):
        _, out, _ = call(*THREE_BLOCKS, "--set", f"precision.reduce={reduce}")
        sent[reduce] = int(re.search(r"\(([\d,]+) bytes\) in 4 reduce-scatters", out)[1].replace(",", ""))
    assert sent["same"] == 2 * sent["bf16"] == 2 * sent["fp16"]
    assert ", fp32, reduced in fp16, 2 ranks" in out


def test_more_of_what_shapes_the_list(call):
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.reshard_after_forward=false")
    assert "kept until backward" in out
    assert "in 4 all-gathers" in out
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.recompute=block", "--set", "shard.recompute_every=2")
    assert "recompute block (1 in 2)" in out
    assert out.count("Recompute(") == 1
    _, out, _ = call(*THREE_BLOCKS, "--set", "shard.recompute=attention")
    assert "recompute attention" in out
    assert "Recompute(" not in out
    two = [*THREE_BLOCKS, "--set", "train.global_batch=4"]
    assert "in 8 reduce-scatters" in call(*two)[1]
    _, out, _ = call(*two, "--set", "shard.accumulate=no_sync")
    assert "no_sync" in out
    assert "in 4 reduce-scatters" in out
    _, out, _ = call(*THREE_BLOCKS, "--set", "model.frozen=h.0.*, wte.*")
    assert "frozen h.0.*, wte.*" in out
    assert "Reduce(h.0)" not in out


def test_one_rank_sends_nothing(call):
    _, out, _ = call(*THREE_BLOCKS[:-2])
    assert "2 micro-batches of 1 sequence a rank" in out
    assert out.count("a rank sends 0 B (0 bytes)") == 3


def test_the_other_kinds(call):
    _, out, _ = call(*THREE_BLOCKS, "--kind", "evaluate")
    assert "Evaluate(head) Release(root)" in out
    assert "Backward" not in out
    assert out.endswith("after the list, one record from every rank: its loss\n")
    _, out, _ = call("--preset", "tiny", "--ranks", "3", "--kind", "predict")
    head = "predict: full_shard, prefetch 1, recompute none, fp32, 3 ranks, the same sequence on every rank\n"
    assert out.startswith(head)
    assert out.count("Predict(") == 1


def test_all_prints_every_micro_batch(call):
    _, out, _ = call("--preset", "tiny")
    assert "... micro-batches 2 to 10 as micro-batch 1 ..." in out
    _, out, _ = call("--preset", "tiny", "--all")
    assert "..." not in out
    assert "Loss(head, 7)" in out


@pytest.mark.parametrize("preset", presets())
def test_every_preset_has_a_list(call, preset):
    code, out, err = call("--preset", preset, "--ranks", "4")
    assert (code, err) == (0, "")
    last = load(None, preset, []).model.layers - 1
    assert f"Await(h.{last}) Forward(h.{last})" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tiny", "--ranks", "5"], "12 micro-batches a step (train.global_batch 12 / train.micro_batch 1) "
         "cannot be dealt evenly to 5 ranks; use 1, 2, 3, 4, 6 or 12 ranks, or change the batches"),
        (["--ranks", "0"], "Invalid value for '--ranks': 0 is not in the range x>=1; see 'mpishard schedule --help'"),
        (["--kind", "all"], "'all' is not one of 'step', 'evaluate', 'predict'"),
        (["--ranks", "4", "--set", "shard.strategy=hybrid_shard", "--set", "shard.group=3"],
         "shard.group is 3 and does not divide 4 ranks; set shard.group to 1, 2 or 4"),
        (["--ranks", "4", "--set", "shard.strategy=hybrid_shard"],
         "shard.group is 0, the ranks of a node, and no nodes are known here; set shard.group"),
        (["--set", "model.frozen=h.9.*"], "frozen pattern 'h.9.*' matches no parameter"),
        (["--set", "model.frozen=*"], "leave nothing to train"),
        (["--set", "shard.prefetch=-1"], "shard.prefetch is -1 in --set; it must be a whole number, at least 0"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(call, arguments, message):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mpishard: ")
    assert message in err
    assert err.count("\n") == 1


def test_only_rank_0_prints(call, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert call(*THREE_BLOCKS) == (0, "", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert call(*THREE_BLOCKS)[1].startswith("step: ")


def test_nothing_is_started():
    code = (
        "import sys, tracemalloc\nfrom mpishard.cli import main\nfrom mpishard.shard.engine import Engine\n"
        "tracemalloc.start()\ntry:\n    main(['schedule', '--preset', 'gpt2-1.5b', '--ranks', '16'])\n"
        "except SystemExit as end:\n    most = tracemalloc.get_traced_memory()[1]\n"
        "    print(end.code, 'mpi4py' in sys.modules, most < 100e6)"
    )
    assert fresh("-c", code).stdout.splitlines()[-1] == "0 False True"
