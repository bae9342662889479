"""The share of a step's communication that computing hides, on a shaped link: scripts/measure_overlap."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.table import rows as table

from two_hosts.launching import find
from two_hosts.measuring import JobError, ranks
from two_hosts.outside import NOT_PERMITTED, Hosts, problem
from two_hosts.program import add_hosts, whole

__all__ = ["OF_CEILING", "TARGET", "bar", "main"]

#: hidden with prefetch by a model of at least 8 blocks whose root holds less than 5 % of the bytes
TARGET, BLOCKS, ROOT = 0.85, 8, 0.05
#: of what the schedule can hide, by any other
OF_CEILING = 0.95


def bar(row: dict[str, Any], blocks: int) -> float:
    """Return the share that is to be hidden at least; none without prefetch, which overlaps nothing."""
    if not row["prefetch"]:
        return -math.inf
    many = blocks >= BLOCKS and row["root"] < ROOT
    return TARGET if many else OF_CEILING * float(row["ceiling"])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="measure_overlap",
        description="Train a GPT-2 on two hosts that this machine plays, over a link whose rate is found so that a "
        "step's communication takes --share of its computation; print how much of it is hidden: "
        "1 - (step - computing) / communicating, medians of the slower rank, all three measured in turn.",
        epilog=f"Exit code: 0 with prefetch at least {TARGET:.0%} is hidden ({OF_CEILING:.0%} of the schedule's "
        f"ceiling for a model of less than {BLOCKS} blocks, or whose root holds {ROOT:.0%} or more), 1 less is, "
        f"2 the ranks failed, {NOT_PERMITTED} the machine does not permit hosts.",
    )
    add_hosts(parser)
    parser.add_argument("--prefetch", type=whole(0), nargs="+", default=[0, 1, 2], metavar="N", help="units (0 1 2)")
    for name, value in (("layers", 12), ("width", 256), ("heads", 4), ("sequence", 128), ("vocabulary", 256)):
        parser.add_argument(f"--{name}", type=whole(1), default=value, metavar="N", help=f"of the model ({value})")
    parser.add_argument("--micro-batch", type=whole(1), default=32, metavar="N", help="sequences of a rank (32)")
    parser.add_argument("--transport", default="mpi", help="mpi, or what else joins hosts")
    parser.add_argument("--share", type=float, default=0.8, help="communication over computation (0.8)")
    parser.add_argument("--repetitions", type=whole(1), default=7, metavar="N", help="of which medians are taken (7)")
    parser.add_argument("--limit", type=float, default=1800.0, metavar="SECONDS", help="end it then (1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures, in seconds and bytes")
    options = parser.parse_args(arguments)
    if not options.share > 0:
        parser.error(f"--share is {options.share:g}; give a number above 0")
    if why := problem(rate=10**9):
        print(f"measure_overlap: hosts cannot be made here: {why}", file=sys.stderr)
        return NOT_PERMITTED
    try:
        hosts = Hosts(find(options.mpi, options.programs))
    except ValueError as error:
        parser.error(str(error))
    sizes = {name: getattr(options, name) for name in ("layers", "width", "heads", "sequence", "vocabulary")}
    task = {name: getattr(options, name) for name in ("prefetch", "micro_batch", "transport", "share", "repetitions")}
    try:
        found = ranks(hosts, "overlap_rank", {**task, "sizes": sizes}, options.limit)
    except JobError as error:
        print(f"measure_overlap: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    root = found["rows"][0]["root"]
    print(f"{found['library']}, transport {options.transport}, {options.layers} blocks, root {root:.1%} of the bytes")
    print(_shown(found["rows"]))
    missed = [row for row in found["rows"] if row["hidden"] < bar(row, options.layers)]
    for row in missed:
        print(f"prefetch {row['prefetch']}: LESS than {bar(row, options.layers):.1%} is hidden")
    return int(bool(missed))


def _shown(rows: Sequence[dict[str, Any]]) -> str:
    head = ("prefetch", "link, Mbit/s", "bytes", "computing, s", "communicating, s", "step, s", "hidden", "ceiling",
            "processor", "shown in a wait at the ceiling")  # fmt: skip
    lines = [
        [
            row["prefetch"],
            f"{row['rate'] / 1e6:.0f}",
            row["bytes"],
            row["computing"],
            row["communicating"],
            row["step"],
            *(f"{row[name]:.1%}" for name in ("hidden", "ceiling", "processor")),
            ", ".join(f"{name} {share:.1%}" for name, share in row["paper"][:2]),
        ]
        for row in rows
    ]
    legend = "hidden and ceiling: of the communication. processor: time that communicating takes of it, of the same."
    return f"{table(head, lines)}\n{legend}"
