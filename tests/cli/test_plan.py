"""mpishard plan: the figures that everybody knows, what it prints, what it refuses, and that it starts nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mpishard.cli import main
from mpishard.plan import DEVICES, PLANNED
from mpishard.train.config import load, presets
from mpishard.train.model import build_model
from tests.cli.processes import fresh

MEMORY = {
    "parameters", "masters", "gradients", "optimizer", "gathered", "unreduced", "saved", "workspace", "staging", "peak"
}  # fmt: skip
STATE = ("parameters", "masters", "gradients", "optimizer")
SMALL = ("--preset", "tiny", "--device", "A100-40GB")


@pytest.fixture
def call(capsys, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        with pytest.raises(SystemExit) as caught:
            main(["plan", *map(str, arguments)])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


@pytest.fixture
def plan(call):
    """The JSON of a plan."""

    def plan(*arguments) -> dict[str, Any]:
        code, out, err = call(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return plan


# --- the figures


def test_175e9_parameters_are_2_8_terabytes_and_70_devices(plan):
    found = plan("--params", "175e9")
    assert found["parameters"] == 175 * 10**9
    assert found["model_state_bytes"] == {
        "parameters": 700 * 10**9, "masters": 0, "gradients": 700 * 10**9, "optimizer": 1400 * 10**9,
        "total": 2_800_000_000_000,
    }  # fmt: skip
    alone = {name: device["model_state_only"] for name, device in found["devices"].items()}
    assert alone == {
        "A100-40GB": 70, "A100-80GB": 35, "H100-80GB": 35, "H200-141GB": 20, "GH200-96GB": 30, "MI250X-64GB": 44
    }  # fmt: skip
    replicated = found["per_rank"]["no_shard"]
    assert sum(replicated[name] for name in STATE) == pytest.approx(2.8e12, rel=0.01)


def test_7e9_parameters_are_112_gigabytes_and_do_not_fit_one_device_of_80(plan):
    found = plan("--params", "7e9", "--ranks", "1")
    assert found["model_state_bytes"]["total"] == 112 * 10**9
    assert found["devices"]["A100-80GB"]["model_state_only"] == 2
    assert found["devices"]["A100-80GB"]["with_everything"] >= 2
    assert found["devices"]["A100-80GB"]["micro_batch"] is None
    for held in found["per_rank"].values():
        assert held["peak"] > 112e9


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_16_bytes_too_in_four_parts(plan, precision):
    found = plan("--params", "175e9", "--set", f"precision.compute={precision}")
    assert found["model_state_bytes"] == {
        "parameters": 350 * 10**9, "masters": 700 * 10**9, "gradients": 350 * 10**9, "optimizer": 1400 * 10**9,
        "total": 2_800_000_000_000,
    }  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_masters_and_moments_are_fp32_whatever_the_precision(plan, precision):
    found = plan("--preset", "gpt2-124m", "--ranks", "4", "--set", f"precision.compute={precision}")
    count = found["parameters"]
    assert count == 124_439_808
    for name, parts in (("no_shard", 1), ("shard_optimizer", 4), ("full_shard", 4)):
        held = found["per_rank"][name]
        assert held["optimizer"] == pytest.approx(8 * count / parts, rel=0.001)
        # in fp32 the parameters are their own masters
        masters = held["parameters"] if precision == "fp32" and name != "shard_optimizer" else held["masters"]
        if precision != "fp32" or name != "shard_optimizer":
            assert masters == pytest.approx(4 * count / parts, rel=0.001)


def test_what_each_strategy_divides(plan):
    found = plan("--preset", "gpt2-1.5b", "--ranks", "60", "--set", "precision.compute=bf16", "--ranks-per-node", "4")
    count, ranks = found["parameters"], 60
    expected = {  # bytes a parameter of parameters, masters, gradients and moments, on a rank
        "no_shard": (2, 4, 4, 8),
        "shard_optimizer": (2, 4 / ranks, 4 / ranks, 8 / ranks),
        "shard_grad_op": (2, 4 / ranks, 4 / ranks, 8 / ranks),
        "full_shard": (0, 4 / ranks, 4 / ranks, 8 / ranks),
        "full_shard_kept": (0, 4 / ranks, 4 / ranks, 8 / ranks),
        "hybrid_shard": (0, 4 / 4, 4 / 4, 8 / 4),
    }
    for name, parts in expected.items():
        held = [found["per_rank"][name][part] for part in STATE]
        assert held == pytest.approx([part * count for part in parts], rel=0.01), name
    peaks = {name: held["peak"] for name, held in found["per_rank"].items()}
    assert peaks["full_shard"] < peaks["full_shard_kept"] < peaks["shard_grad_op"] <= peaks["shard_optimizer"]
    assert peaks["full_shard"] < peaks["hybrid_shard"] < peaks["no_shard"]
    assert found["by_ranks"][0]["hybrid_group"] == 4
    sent = {name: kinds["total"] for name, kinds in found["by_ranks"][0]["communication"].items()}
    assert sent["full_shard_kept"] < sent["full_shard"]


def test_more_ranks_divide_the_state(plan):
    found = plan("--params", "7e9", "--ranks", "1,2,8", "--strategy", "full_shard,no_shard")
    assert [each["ranks"] for each in found["by_ranks"]] == [1, 2, 8]
    states = {
        name: [sum(each["per_rank"][name][part] for part in STATE) for each in found["by_ranks"]]
        for name in ("full_shard", "no_shard")
    }
    assert states["full_shard"] == pytest.approx([states["full_shard"][0] / ranks for ranks in (1, 2, 8)], rel=0.001)
    assert states["no_shard"] == pytest.approx([states["no_shard"][0]] * 3, rel=0.001)


# --- the JSON


def test_the_keys_of_the_json(plan):
    found = plan("--preset", "tiny", "--ranks", "4,2,3", "--set", "comm.share_gathered=false")
    assert list(found) == [
        "parameters", "assumed", "assumed_sizes", "assumed_fields", "settings", "model_state_bytes", "ranks",
        "per_rank", "by_ranks", "micro_batch_strategy", "devices", "notes",
    ]  # fmt: skip
    assert (found["assumed"], found["assumed_sizes"], found["assumed_fields"]) == (False, {}, [])
    assert found["ranks"] == 4
    assert list(found["per_rank"]) == list(PLANNED)
    assert [each["ranks"] for each in found["by_ranks"]] == [4, 2, 3]
    assert found["per_rank"] == found["by_ranks"][0]["per_rank"]
    for each in found["by_ranks"]:
        assert set(each) == {"ranks", "micro_batches", "dealt", "hybrid_group", "per_rank", "communication"}
        assert (each["micro_batches"], each["dealt"]) == (12 // each["ranks"], True)
        for held in each["per_rank"].values():
            assert set(held) == MEMORY
            assert held["peak"] == sum(count for name, count in held.items() if name != "peak")
        for kinds in each["communication"].values():
            assert kinds["total"] == sum(count for name, count in kinds.items() if name != "total")
    assert list(found["devices"]) == list(DEVICES)
    for name, device in found["devices"].items():
        assert device == {
            "memory": DEVICES[name], "model_state_only": 1, "with_everything": 1, "micro_batch": device["micro_batch"]
        }  # fmt: skip
    assert found["micro_batch_strategy"] == "full_shard"
    assert found["notes"] == []


def test_a_number_of_parameters_has_assumed_shapes(plan, call):
    found = plan("--params", "175e9")
    assert found["assumed"] is True
    assert found["assumed_sizes"] == {
        "source": "GPT-3's aspect ratio (Brown et al. 2020, table 2.1)", "layers": 96, "width": 12288, "heads": 96,
        "sequence": 2048, "vocabulary": 50257, "parameters": 174_604_259_328,
    }  # fmt: skip
    assert found["assumed_fields"] == ["per_rank", "by_ranks", "devices.*.with_everything", "devices.*.micro_batch"]
    assert "assumed sizes" in found["notes"][0]
    _, out, _ = call("--params", "175e9", "--device", "A100-40GB")
    for words in ("2.8 TB", "assumed", "Brown et al. 2020", "layers 96, width 12,288", "175,000,000,000 parameters"):
        assert words in out


def test_assumed_shapes_can_be_set_in_part(plan):
    found = plan("--params", "1e9", "--set", "model.sequence=512", "--set", "model.vocabulary=1000",
                 "--set", "train.micro_batch=4")  # fmt: skip
    sizes = found["assumed_sizes"]
    assert (sizes["sequence"], sizes["vocabulary"]) == (512, 1000)
    assert sizes["parameters"] == pytest.approx(1e9, rel=0.03)
    assert found["settings"]["micro_batch"] == 4
    assert found["by_ranks"][0]["micro_batches"] == 1
    given = plan("--params", "1e9", "--set", "train.global_batch=16", "--ranks", "4")
    assert given["by_ranks"][0]["micro_batches"] == 4


@pytest.mark.parametrize("preset", [name for name in presets() if name != "gpt2-774m"])
def test_every_preset_has_a_plan_of_its_own_parameters(plan, preset):
    found = plan("--preset", preset, "--strategy", "full_shard", "--device", "A100-80GB")
    model = build_model(load(None, preset, []).model)
    assert found["parameters"] == model.parameters
    assert found["model_state_bytes"]["total"] == 16 * model.parameters


def test_settings_change_the_plan(plan):
    def saved(*settings):
        words = [word for setting in settings for word in ("--set", setting)]
        return plan(*SMALL, "--set", "model.layers=5", "--strategy", "full_shard", *words)["per_rank"]["full_shard"][
            "saved"
        ]

    assert saved("shard.recompute=block") < saved("shard.recompute=attention") < saved()
    assert saved("shard.recompute=block") < saved("shard.recompute=block", "shard.recompute_every=2") < saved()
    frozen = plan("--preset", "tiny", "--set", "model.frozen=wte.*", "--strategy", "ddp")
    whole = plan("--preset", "tiny", "--strategy", "ddp")
    assert frozen["per_rank"]["no_shard"]["optimizer"] < whole["per_rank"]["no_shard"]["optimizer"]
    assert frozen["per_rank"]["no_shard"]["parameters"] == pytest.approx(
        whole["per_rank"]["no_shard"]["parameters"], rel=0.1
    )
    assert frozen["model_state_bytes"] == whole["model_state_bytes"]


def test_the_price_of_no_sync_shows(plan):
    words = [*SMALL, "--ranks", "2", "--strategy", "full_shard", "--set", "model.layers=5", "--set"]
    once, each = plan(*words, "shard.accumulate=no_sync"), plan(*words, "shard.accumulate=reduce")
    assert once["per_rank"]["full_shard"]["unreduced"] > each["per_rank"]["full_shard"]["unreduced"]
    sent = [found["by_ranks"][0]["communication"]["full_shard"]["reduce_scatter"] for found in (once, each)]
    assert 6 * sent[0] == sent[1]


def test_offload_is_planned(plan):
    found = plan("--preset", "gpt2-124m", "--set", "shard.offload=optimizer", "--strategy", "full_shard")
    held = found["per_rank"]["full_shard"]
    assert held["optimizer"] == 0
    assert held["host"] == pytest.approx(8 * 124_439_808 / 8, rel=0.6)
    assert found["settings"]["offload"] == "optimizer"


def test_strategies_have_aliases_and_come_in_the_order_asked_for(plan):
    found = plan(*SMALL, "--strategy", "zero1,ddp,full_shard_kept,zero1")
    assert list(found["per_rank"]) == ["shard_optimizer", "no_shard", "full_shard_kept"]
    assert found["micro_batch_strategy"] == "shard_optimizer"
    kept = plan(*SMALL, "--set", "shard.reshard_after_forward=false")
    assert kept["micro_batch_strategy"] == "full_shard_kept"


def test_a_device_by_its_memory(plan):
    found = plan("--params", "7e9", "--device-memory", "24GB")
    assert list(found["devices"]) == ["24GB", *DEVICES]
    assert found["devices"]["24GB"]["memory"] == 24 * 10**9
    assert found["devices"]["24GB"]["model_state_only"] == 5
    binary = plan("--params", "7e9", "--device-memory", "24 gib", "--device", "a100-40gb")
    assert list(binary["devices"]) == ["24GiB", "A100-40GB"]


def test_what_fits_fits_and_one_less_does_not(plan):
    found = plan("--preset", "gpt2-124m", "--device-memory", "4GB", "--ranks", "3")
    least, most = found["devices"]["4GB"]["with_everything"], found["devices"]["4GB"]["micro_batch"]
    for ranks, fits in ((least, True), (least - 1, False)):
        each = plan("--preset", "gpt2-124m", "--ranks", ranks, "--device", "A100-40GB")
        assert (each["per_rank"]["full_shard"]["peak"] <= 4e9) is fits
    for samples, fits in ((most, True), (most + 1, False)):
        batch = [f"train.micro_batch={samples}", f"train.global_batch={samples}"]
        each = plan(
            "--preset", "gpt2-124m", "--ranks", "3", "--device", "A100-40GB", "--set", batch[0], "--set", batch[1]
        )
        assert (each["per_rank"]["full_shard"]["peak"] <= 4e9) is fits


def test_what_does_not_fit_says_why(plan, call):
    found = plan("--params", "175e9", "--device", "A100-40GB", "--ranks", "1024")
    device = found["devices"]["A100-40GB"]
    assert (device["with_everything"], device["micro_batch"]) == (None, None)
    assert "the largest part is saved" in device["why"]
    assert 'GB: set shard.recompute to "block", or take shorter sequences' in device["why"]
    _, out, _ = call("--params", "175e9", "--device", "A100-40GB", "--ranks", "1024")
    assert f"none: {device['why']}" in out.splitlines()
    helped = plan("--params", "175e9", "--device", "A100-40GB", "--ranks", "1024", "--set", "shard.recompute=block",
                  "--set", "precision.compute=bf16")  # fmt: skip
    assert helped["devices"]["A100-40GB"]["with_everything"] > 70
    assert "why" not in helped["devices"]["A100-40GB"]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([], 'saved, 2.4 GB: set shard.recompute to "block", or take a smaller micro-batch'),
        (["shard.recompute=block"], "saved, "),
        (["shard.recompute=block", "train.micro_batch=1"], "gathered, "),
        (["shard.recompute=block", "train.micro_batch=1"], "compute in 16 bits, or set shard.prefetch to 0"),
        (["shard.recompute=block", "train.micro_batch=1", "precision.compute=bf16"], ": set shard.prefetch to 0"),
        (["shard.recompute=block", "train.micro_batch=1", "precision.compute=bf16", "shard.prefetch=0"],
         ": make units smaller, as by a smaller width or vocabulary"),
    ],
)  # fmt: skip
def test_what_helps_depends_on_what_is_set_already(plan, settings, remedy):
    words = [word for setting in settings for word in ("--set", setting)]
    found = plan("--preset", "gpt2-124m", "--device-memory", "100MB", "--device", "A100-40GB", *words)
    assert remedy in found["devices"]["100MB"]["why"]


def test_models_beyond_any_address_space_have_plans(plan):
    one = ("--params", "1e13", "--strategy", "no_shard,full_shard_kept", "--device", "A100-40GB")
    found = plan(*one, "--set", "comm.transport=mpi")
    assert found["model_state_bytes"]["total"] == 160 * 10**12
    held = found["per_rank"]["no_shard"]
    assert sum(held[name] for name in STATE) == pytest.approx(160e12, rel=0.01)
    assert found["per_rank"]["full_shard_kept"]["gathered"] == pytest.approx(40e12, rel=0.02)


def test_ranks_need_not_divide_the_batch(plan, call):
    found = plan("--preset", "tiny", "--ranks", "5,6", "--device", "A100-40GB")
    assert [(each["micro_batches"], each["dealt"]) for each in found["by_ranks"]] == [(1, False), (2, True)]
    assert found["notes"] == [
        "the global batch cannot be dealt evenly to 5 ranks; they are planned with one micro-batch each",
        "planned on the CPUs of a node, whose ranks share what they gather; --set device.kind=cuda plans GPUs",
    ]
    _, out, _ = call("--preset", "tiny", "--ranks", "5")
    assert f"note: {found['notes'][0]}" in out.splitlines()


def test_groups_are_those_of_a_node_or_divide_the_ranks(plan):
    found = plan(*SMALL, "--ranks", "8,12,7,3", "--strategy", "hybrid_shard")
    assert [each["hybrid_group"] for each in found["by_ranks"]] == [8, 6, 7, 3]
    own = plan(*SMALL, "--ranks", "12", "--set", "shard.strategy=hybrid_shard", "--set", "shard.group=2")
    assert own["by_ranks"][0]["hybrid_group"] == 2
    assert own["micro_batch_strategy"] == "hybrid_shard"


# --- people


def test_the_tables(call):
    code, out, err = call("--params", "7e9", "--ranks", "8,64")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines()[5:])) <= 120
    for words in (
        "7,000,000,000 parameters; 16 bytes each of model state are 112.0 GB: parameters 28.0 GB, gradients 28.0 GB",
        "Memory of a rank on 8 ranks, 1 micro-batch each, hybrid_shard in groups of 8 (assumed shapes)",
        "Peak of a rank, and below it what it sends in a step",
        "largest micro-batch, full_shard",
    ):
        assert words in out
    lines = [line.split() for line in out.splitlines()]
    assert [*PLANNED] in lines
    assert ["ranks", *PLANNED] in lines
    assert any(line[:1] == ["peak"] and len(line) == 13 for line in lines)
    assert any(line[:4] == ["A100-80GB", "80.0", "GB", "2"] for line in lines)
    assert "masters" not in "".join(line[0] for line in lines if line)  # a row of zeros


def test_only_rank_0_prints(call, monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert call(*SMALL) == (0, "", "")
    monkeypatch.setenv("PMI_RANK", "0")
    assert call(*SMALL)[1].startswith("34,688 parameters")


def test_nothing_is_started_and_no_memory_is_taken():
    code = (
        "import sys, tracemalloc\nfrom mpishard.cli import main\nimport mpishard.plan.report\ntracemalloc.start()\n"
        "try:\n    main(['plan', '--params', '175e9', '--ranks', '1024', '--json'])\n"
        "except SystemExit as end:\n    most = tracemalloc.get_traced_memory()[1]\n"
        "    loaded = {'mpi4py', 'cupy', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "    print(end.code, loaded, most < 100e6)"
    )
    assert fresh("-c", code).stdout.splitlines()[-1] == "0 set() True"
