"""One rank of a large job, run here alone: what its process holds at its peak, beside the plan of that rank."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measure.jobs import environment
from measure.process import MIB, follow
from measure.table import rows
from mpishard.data.tokens import write_tokens
from mpishard.train.config import load

__all__ = ["BAR", "main"]

#: the largest relative difference of the process's growth from the plan
BAR = 0.05


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="check_large_world",
        description="Run `mpishard train --as-rank` on random tokens, watch its process, and compare its peak with the "
        "plan.",
        epilog="Exit code: 0 the rank held what was planned, to the byte in each category, its process grew by that "
        f"within {BAR:.0%}, and held at most --most; 1 not so; 2 it did not run.",
    )
    parser.add_argument("--as-rank", default="0/1024", metavar="R/N", help="the rank and the ranks (0/1024)")
    parser.add_argument("--preset", default="gpt-7b", metavar="NAME", help="settings to begin with (gpt-7b)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as in mpishard train")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="steps to run (1)")
    parser.add_argument("--most", type=float, default=12.0, metavar="GB", help="of the whole process (12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for what was found, in bytes")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = _run(options, Path(folder))
    if found is None:
        return 2
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return _report(found, options.most)


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    settings = [f"train.steps={options.steps}", *options.set]
    config = load(None, options.preset, settings)
    windows = options.steps * config.train.global_batch
    vocabulary = config.model.vocabulary
    for name in ("train", "heldout"):
        path = folder / f"{name}.tokens"
        tokens = np.random.default_rng(0).integers(0, vocabulary, windows * config.model.sequence + 1, dtype=np.uint32)
        write_tokens(path, [tokens], vocabulary)
        settings.append(f"data.{name}={path}")
    command = [sys.executable, "-m", "mpishard", "train", "--preset", options.preset, "--as-rank", options.as_rank]
    command += ["--run-dir", str(folder / "run"), *(word for setting in settings for word in ("--set", setting))]
    process = subprocess.Popen(command, env=environment())
    try:
        resident, proportional = follow(process)
    finally:
        process.kill()
    if process.returncode:
        print(f"check_large_world: mpishard train ended with exit code {process.returncode}", file=sys.stderr)
        return None
    record = json.loads((folder / "run" / "as-rank.json").read_text())
    return {**record, "peak": proportional, "resident": resident, "command": command}


def _report(found: dict[str, Any], most: float) -> int:
    planned, held = found["bytes_planned"], found["bytes"]
    names = [name for name in planned if planned[name] or held[name]]
    lines = [[name, f"{planned[name] / MIB:.1f}", f"{held[name] / MIB:.1f}"] for name in names]
    total = sum(planned.values())
    grown = found["resident"] - found["resident_before"]
    print()
    print(rows(("MiB", "planned", "held"), [*lines, ["sum", f"{total / MIB:.1f}", f"{sum(held.values()) / MIB:.1f}"]]))
    print(
        f"resident: {found['resident_before'] / MIB:.0f} MiB before it took its memory, {found['resident'] / MIB:.0f} "
        f"at its peak, {grown / MIB:.0f} more, {grown / total - 1:+.2%} from the plan\n"
        f"proportional set size at the peak, whole: {found['peak'] / MIB:.0f} MiB, {found['peak'] / 1e9:.2f} GB"
    )
    problems = []
    if planned != held:
        problems.append("what it held is not what was planned")
    if abs(grown / total - 1) > BAR:
        problems.append(f"the process grew by more than {BAR:.0%} from the plan")
    if found["peak"] > most * 1e9:
        problems.append(f"it held more than {most:g} GB")
    print("; ".join(problems) or f"as planned, and within {most:g} GB")
    return int(bool(problems))
