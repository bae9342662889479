"""mpishard and PyTorch's FSDP2 train the same model one after the other, and their memory is compared."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import jobs
from measure.options import full_shard_option
from measure.process import MIB, Rank
from measure.table import Peak, outside, parts, rows
from mpishard.models.gpt2 import Gpt2

__all__ = ["BARS", "main"]

#: our largest rank over FSDP2's mean rank, at most. What an allocator holds depends on the timing of threads, so the
#: ranks of FSDP2 differ by up to a fifth, from run to run too; their mean hardly does.
BARS = {"above start": 0.65, "whole": 0.6}
#: the figures of a :class:`Peak` that these are of
SIDES = {"above start": "above", "whole": "whole"}
MODELS = {
    "gpt2-124m": Gpt2(layers=12, width=768, heads=12, sequence=256, vocabulary=50257, positions=1024),
    "tiny": Gpt2(layers=2, width=64, heads=4, sequence=32, vocabulary=1000),
}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    given = MODELS[options.model]
    sizes = Gpt2(**{**vars(given), "sequence": options.sequence or given.sequence})
    own = {"dtype": "bf16", "device": "cpu", **dict(options.option)}
    alone = options.ours or importlib.util.find_spec("torch") is None
    try:
        mine = jobs.ours(options.ranks, sizes, options.steps, options.micro_batch, own)
        theirs = [] if alone else jobs.fsdp2(options.ranks, sizes, options.steps, options.micro_batch)
    except jobs.JobError as error:
        print(f"compare_fsdp2_memory: {error}", file=sys.stderr)
        return 2
    ratios = report(options, sizes, own, mine, theirs)
    if options.json:
        result = {"mpishard": [Peak(r).figures() for r in mine], "fsdp2": [Peak(r).figures() for r in theirs]}
        options.json.write_text(json.dumps(result | {"ratios": ratios}, indent=1) + "\n")
    return int(any(ratios[what][0] > bar for what, bar in BARS.items() if what in ratios))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="compare_fsdp2_memory",
        description="Train GPT-2 with mpishard over MPI, then with PyTorch's FSDP2 over gloo, and compare the peak "
        "memory of each rank as the operating system counts it.",
        epilog="Exit code: 0 the peak of our largest rank is at most "
        + " and ".join(f"{bar} {what}" for what, bar in BARS.items())
        + " of that of FSDP2's mean rank, 1 it is more, 2 a job failed. Without PyTorch mpishard alone is measured.",
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks of each job (4)")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps of training (3)")
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m", help="gpt2-124m (the default), or a tiny one")
    parser.add_argument("--sequence", type=int, metavar="TOKENS", help="tokens of a sequence (256; tiny: 32)")
    parser.add_argument("--micro-batch", type=int, default=1, metavar="N", help="sequences of a rank (1)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=full_shard_option,
        metavar="NAME=VALUE",
        help="of full_shard, such as prefetch=0",
    )
    parser.add_argument("--ours", action="store_true", help="measure mpishard alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures, in bytes")
    return parser


def report(
    options: argparse.Namespace, sizes: Gpt2, own: dict[str, Any], mine: list[Rank], theirs: list[Rank]
) -> dict[str, tuple[float, float]]:
    """Print everything; return our largest rank over FSDP2's mean and smallest, above the start and whole."""
    libraries = [rank.mark("end").more["library"] for rank in (*mine[:1], *theirs[:1])]
    print(
        f"{options.model}, sequence {sizes.sequence}, micro-batch {options.micro_batch} a rank, {options.ranks} ranks, "
        f"{options.steps} steps\n"
        f"mpishard: {', '.join(f'{name} {value}' for name, value in own.items())}, {libraries[0]}"
    )
    if theirs:
        print(
            f"FSDP2: {libraries[1]}, gloo; meta-device start, each block and the root sharded; bf16 parameters and "
            "activations, fp32 reduction and masters; fused AdamW"
        )
    print("\nProportional set size of each rank in MiB; start: modules imported, ranks connected, one product done")
    lines: list[list[object]] = []
    for name, job in (("mpishard", mine), ("FSDP2", theirs)):
        for number, rank in enumerate(job):
            peak = Peak(rank)
            sizes_ = (peak.start, peak.whole, peak.above, peak.resident)
            lines.append([f"{name} {number}", *(f"{size / MIB:.0f}" for size in sizes_)])
    print(rows(("rank", "start", "peak", "above start", "above start, resident"), lines))
    print(f"\nmpishard's plan for rank 0: {parts(Peak(mine[0]).plan)}")
    for number, rank in enumerate(mine):
        peak = Peak(rank)
        print(f"rank {number}: plan {sum(peak.plan.values()) / MIB:.1f}, outside of it {outside(peak)}")
    if not theirs:
        print("\nFSDP2 was not measured" + ("" if options.ours else ": PyTorch is not installed"))
        return {}
    print("\nmpishard's largest rank / FSDP2")
    found = {}
    for what, side in SIDES.items():
        own_, others = ([getattr(Peak(rank), side) for rank in job] for job in (mine, theirs))
        found[what] = _ratios(own_, others)
    print(rows(("", "mean rank", "smallest rank", "bar"), [[what, *found[what], BARS[what]] for what in found]))
    return found


def _ratios(mine: Sequence[int], theirs: Sequence[int]) -> tuple[float, float]:
    """Return our largest rank over their mean and over their smallest."""
    return max(mine) / (sum(theirs) / len(theirs)), max(mine) / min(theirs)
