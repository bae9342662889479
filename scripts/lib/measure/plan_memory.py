"""What the processes of a training job hold, as the operating system counts it, against the plan of the engine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import jobs
from measure.options import full_shard_option
from measure.process import MIB
from measure.table import Peak, outside, parts, rows
from mpishard.models.gpt2 import Gpt2

__all__ = ["BAR", "main"]

#: the largest relative difference of a process's growth from the plan
BAR = 0.05
#: 50 million parameters
SIZES = Gpt2(layers=8, width=640, heads=10, sequence=64, vocabulary=16384)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="check_memory",
        description="Train a GPT-2 of 50 million parameters, and compare the proportional set size of each process "
        "above its start with the plan, the sum of engine.memory().",
        epilog=f"Exit code: 0 they agree within {BAR:.0%} on every rank, 1 they do not, 2 a job failed.",
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2], metavar="N", help="ranks, a job for each (1 2)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps of training (3)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences of a rank (1)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=full_shard_option,
        metavar="NAME=VALUE",
        help="of full_shard, such as strategy=no_shard",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures, in bytes")
    options = parser.parse_args(arguments)
    own = {"device": "cpu", **dict(options.option)}
    found: dict[int, list[Peak]] = {}
    for ranks in options.ranks:
        try:
            job = jobs.ours(ranks, SIZES, options.steps, options.micro_batch, own)
        except jobs.JobError as error:
            print(f"check_memory: {error}", file=sys.stderr)
            return 2
        found[ranks] = [Peak(rank) for rank in job]
        if len(found) == 1:
            words = [f"{name} {value}" for name, value in own.items()]
            print(", ".join([*words, job[0].mark("end").more["library"]]))
        print(f"\n{ranks} rank{'s' * (ranks > 1)}, the plan of rank 0 in MiB: {parts(found[ranks][0].plan)}")
        print(_table(found[ranks]))
    if options.json:
        options.json.write_text(json.dumps({ranks: [p.figures() for p in peaks] for ranks, peaks in found.items()}))
    worst = max((_difference(peak) for peaks in found.values() for peak in peaks), key=abs)
    print(f"\nfrom the plan: {worst:+.2%} at most, {'within' if abs(worst) <= BAR else 'ABOVE'} the bar of {BAR:.0%}")
    return int(abs(worst) > BAR)


def _difference(peak: Peak) -> float:
    return peak.above / sum(peak.plan.values()) - 1


def _table(peaks: Sequence[Peak]) -> str:
    lines = [
        [
            str(rank),
            *(f"{size / MIB:.1f}" for size in (peak.start, peak.whole, peak.above, sum(peak.plan.values()))),
            f"{_difference(peak):+.2%}",
            outside(peak),
        ]
        for rank, peak in enumerate(peaks)
    ]
    return rows(("rank", "start", "peak", "above start", "plan", "difference", "outside the plan at the end"), lines)
