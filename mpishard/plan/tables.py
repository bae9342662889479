"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table

from mpishard.plan.quantities import readable
from mpishard.plan.report import Plan, Ranks

__all__ = ["tables"]


def tables(plan: Plan) -> Iterator[str | Table]:
    """Yield lines and tables, in the order in which they are read."""
    state = plan.model_state_bytes
    parts = ", ".join(f"{name} {readable(state[name])}" for name in state if name != "total" and state[name])
    yield f"{plan.parameters:,} parameters; 16 bytes each of model state are {readable(state['total'])}: {parts}"
    yield "; ".join(f"{name} {value}" for name, value in plan.settings.items())
    for note in plan.notes:
        yield f"note: {note}"
    first = plan.by_ranks[0]
    yield from _per_rank(first, bool(plan.assumed))
    if len(plan.by_ranks) > 1:
        yield "Peak of a rank, and below it what it sends in a step"
        yield _by_ranks(plan)
    if plan.devices:
        yield "Devices"
        yield _devices(plan, first.ranks)
        yield from dict.fromkeys(f"none: {device.why}" for device in plan.devices.values() if device.why)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))


def _ranks(count: int) -> str:
    return f"{count:,} rank{'' if count == 1 else 's'}"


def _per_rank(each: Ranks, assumed: bool) -> Iterator[str | Table]:
    about = f", {each.micro_batches:,} micro-batch{'' if each.micro_batches == 1 else 'es'} each"
    if each.hybrid_group:
        about += f", hybrid_shard in groups of {each.hybrid_group}"
    yield f"Memory of a rank on {_ranks(each.ranks)}{about}{' (assumed shapes)' if assumed else ''}"
    table = _table()
    table.add_column("")
    for name in each.per_rank:
        table.add_column(name, justify="right")
    held = list(each.per_rank.values())
    for category in held[0]:
        if category == "peak":
            table.add_section()
        elif not any(one[category] for one in held):
            continue
        table.add_row(category, *(readable(one[category]) for one in held))
    table.add_row("sent in a step", *(readable(one["total"]) for one in each.communication.values()))
    yield table


def _by_ranks(plan: Plan) -> Table:
    table = _table()
    table.add_column("ranks", justify="right")
    for name in plan.by_ranks[0].per_rank:
        table.add_column(name, justify="right")
    for each in plan.by_ranks:
        table.add_row(
            f"{each.ranks:,}",
            *(
                f"{readable(held['peak'])}\n{readable(each.communication[name]['total'])}"
                for name, held in each.per_rank.items()
            ),
        )
    return table


def _devices(plan: Plan, ranks: int) -> Table:
    table = _table()
    table.add_column("device")
    table.add_column("memory", justify="right")
    table.add_column("for the model\nstate alone", justify="right")
    table.add_column("full_shard with\neverything", justify="right")
    table.add_column(f"largest micro-batch, {plan.strategy},\n{_ranks(ranks)}", justify="right")
    for name, device in plan.devices.items():
        table.add_row(
            name,
            readable(device.memory),
            f"{device.model_state_only:,}",
            "none" if device.with_everything is None else f"{device.with_everything:,}",
            "none" if device.micro_batch is None else f"{device.micro_batch:,}",
        )
    return table
