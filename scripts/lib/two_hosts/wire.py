"""Bytes that a collective sends over the link of a host, against what is due: scripts/check_link_bytes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.table import rows as table

from two_hosts.launching import find
from two_hosts.measuring import JobError, ranks
from two_hosts.outside import NOT_PERMITTED, Hosts, problem
from two_hosts.program import add_hosts, whole

__all__ = ["MORE", "due", "main", "verdict"]

#: what headers and acknowledgements may add, and messages of the library and of this program
MORE = 0.03


def due(op: str, transport: str, nbytes: int, size: int, local: int) -> tuple[float, float]:
    """Return the least and the most bytes of fp32 data that a host may send in one collective.

    With N ranks, g of them on each host, and S bytes in all: what a rank needs from other hosts is (N-g)/N of S. A
    reduce-scatter of ``hierarchical`` sums inside the host first, so a host sends that much once; a flat one sends it
    from each of its ranks. An all-gather sends each rank's part at least once to every other host; a library's own may
    send it to several ranks of a host.

    Args:
        size, local: N and g.
    """
    once = nbytes * (size - local) / size
    if transport == "hierarchical":
        return once, once
    return (once * local if op == "reduce_scatter" else once), once * local


def verdict(row: dict[str, Any]) -> str:
    """Return ``as due``, or what is wrong with a measured row."""
    least, most = due(row["op"], row["transport"], row["bytes"], row["ranks"], row["ranks_per_host"])
    if not row["correct"]:
        return "WRONG RESULT"
    if min(row["sent"]) < least:
        return "LESS THAN DUE"  # it went another way than over the link
    return "as due" if max(row["sent"]) <= most * (1 + MORE) else "MORE THAN DUE"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="check_link_bytes",
        description="Count what fp32 collectives send over the links of hosts that this machine plays.",
        epilog=f"Exit code: 0 as due, 1 not, 2 the ranks failed, {NOT_PERMITTED} the machine does not permit hosts.",
    )
    add_hosts(parser)
    parser.add_argument("--hosts", type=whole(2, 250), default=2, metavar="N", help="hosts (2)")
    parser.add_argument("--ranks-per-host", type=whole(1), default=2, metavar="N", help="ranks of each (2)")
    parser.add_argument("--transports", default="mpi,hierarchical", metavar="NAMES", help="mpi,hierarchical")
    parser.add_argument("--bytes", type=whole(64), default=1 << 24, metavar="N", help="full size (16777216)")
    parser.add_argument("--calls", type=whole(1), default=5, metavar="N", help="collectives to count (5)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="end it then (300)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all figures")
    options = parser.parse_args(arguments)
    if why := problem():
        print(f"check_link_bytes: hosts cannot be made here: {why}", file=sys.stderr)
        return NOT_PERMITTED
    try:
        hosts = Hosts(find(options.mpi, options.programs), options.hosts, options.ranks_per_host)
    except ValueError as error:
        parser.error(str(error))
    task = {"transports": options.transports.split(","), "bytes": options.bytes, "calls": options.calls}
    try:
        found = ranks(hosts, "wire_rank", task, options.limit)
    except JobError as error:
        print(f"check_link_bytes: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")
    print(_shown(found))
    return int(any(verdict(row) != "as due" for row in found))


def _shown(found: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in found:
        least, most = due(row["op"], row["transport"], row["bytes"], row["ranks"], row["ranks_per_host"])
        wanted = f"{least / row['bytes']:.3f}" + ("" if least == most else f" to {most / row['bytes']:.3f}")
        share = [one / row["bytes"] for one in row["sent"]]
        lines.append([row["transport"], row["op"], row["bytes"], min(share), max(share), wanted, verdict(row)])
    return table(("transport", "collective", "bytes", "least a host sent", "most", "due", ""), lines)
