"""mpishard plan: pictures, and mistakes."""

from __future__ import annotations

import json

import pytest

from mpishard.cli import main

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


def test_a_transport_of_one_host(call):
    code, out, err = call(*SMALL, "--set", "comm.transport=node", "--ranks", "4,16")
    assert (code, out) == (2, "")
    assert err == (
        "mpishard: comm.transport is node, which is one host, and --ranks is 4,16 on nodes of 8; leave it at auto, or "
        "say --ranks-per-node\n"
    )
    assert call(*SMALL, "--set", "comm.transport=node", "--ranks", "16", "--ranks-per-node", "16")[0] == 0


# --- the picture


def test_a_picture(call, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'mpishard[plot]'")
    for name, begins in (("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")):
        code, out, err = call(*SMALL, "--plot", tmp_path / name)
        assert (code, err) == (0, "")
        assert f"plot: {tmp_path / name}" in out.splitlines()
        assert (tmp_path / name).read_bytes().startswith(begins)
    text = (tmp_path / "plan.svg").read_text()
    for words in ("gathered", "optimizer", "full_shard_kept", "A100-40GB", "peak of a rank", "a rank of 8"):
        assert f"<!-- {words} -->" in text
    assert json.loads(call(*SMALL, "--ranks", "1,2", "--json", "--plot", tmp_path / "two.svg")[1])["ranks"] == 1


def test_a_picture_that_cannot_be_written(call, tmp_path, monkeypatch):
    code, out, err = call(*SMALL, "--plot", tmp_path / "plan.jpeg")
    assert (code, out) == (2, "")
    assert "its name must end in .png, .svg or .pdf" in err
    code, out, err = call(*SMALL, "--plot", tmp_path / "nowhere" / "plan.png")
    assert (code, out) == (2, "")
    assert "choose another with --plot" in err
    monkeypatch.setattr("mpishard.pictures.find_spec", lambda name: None)
    code, out, err = call(*SMALL, "--plot", tmp_path / "plan.png")
    assert (code, out) == (2, "")
    assert err == "mpishard: --plot needs matplotlib, which is not installed; pip install 'mpishard[plot]'\n"


def test_a_folder_in_the_place_of_a_picture(call, tmp_path):
    pytest.importorskip("matplotlib", reason="pip install 'mpishard[plot]'")
    (tmp_path / "plan.png").mkdir()
    code, out, err = call(*SMALL, "--plot", tmp_path / "plan.png")
    assert (code, out) == (2, "")
    assert "cannot be written (Is a directory); choose another with --plot" in err


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "there is no plan for zero ranks; give 1 to 1,000,000 of them"),
        (["--ranks", "8,0"], "there is no plan for zero ranks"),
        (["--ranks=-1"], "there is no plan for -1 ranks"),
        (["--ranks", "some"], "--ranks is 'some'; it must be whole numbers between commas"),
        (["--device-memory", "24"], "--device-memory is '24', without a unit; write 24GB (10**9 bytes) or 24GiB"),
        (["--device", "A200"], "there is no device 'A200'"),
        (["--params", "0"], "--params is '0'; a model has at least 1 parameter"),
        (["--params=-7e9"], "--params is '-7e9'; it must be a whole number above 0"),
        (["--params", "nan"], "--params is 'nan'; it must be a whole number above 0"),
        (["--params", "inf"], "--params is 'inf'; it must be a whole number above 0"),
        (["--params", "1.5"], "--params is '1.5'; there are no parts of parameters"),
        (["--params", "7e9", "--preset", "tiny"], "--params and --preset were given, which both say how large"),
        (["--params", "7e9", "--config", "x.toml"], "--params and --config were given, which both say how large"),
        (["--params", "7e9", "--set", "model.layers=3"], "--params and model.layers were given, which both say how"),
        (["--params", "7e9", "--set", "train.micro_batch=many"], 'train.micro_batch is "many"'),
        (["--preset", "gpt3"], "there is no preset 'gpt3'"),
        (["--strategy", "zero4"], "there is no strategy 'zero4' to plan; there are no_shard, shard_optimizer"),
        (["--params", "7e9", "--set", "train.micro_batch=0"], "train.micro_batch is 0 in --set; it must be a whole"),
        (["--params", "7e9", "--set", "train.micro_batch=99999999"], "train.micro_batch is 99999999 in --set; it must"),
        (["--preset", "tiny", "--set", "comm.transport=local"], "comm.transport is local, which is one rank alone,"),
        (["--ranks-per-node", "0"], "Invalid value for '--ranks-per-node'"),
        (["--set", "shard.strategy=hybrid_shard", "--set", "shard.group=3", "--ranks", "8"],
         "shard.group is 3 and does not divide 8 ranks; set shard.group to 1, 2, 4 or 8"),
        (["--set", "shard.offload=disk"], 'shard.offload is "disk" in --set; it must be none or optimizer'),
        (["--set", "precision.compute=fp16", "--set", "precision.loss_scale=fixed", "--set", "precision.scale=0"],
         "precision.scale is 0"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["tables", "json"])
def test_a_mistake_is_one_line_and_exit_code_2(call, arguments, message, as_json):
    code, out, err = call(*arguments, *as_json)
    assert (code, out) == (2, "")
    assert err.startswith("mpishard: ")
    assert message in err
    assert err.count("\n") == 1
