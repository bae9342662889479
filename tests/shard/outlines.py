"""Models as schedules see them, of many kinds, made by hand."""

from __future__ import annotations

from mpishard.shard.instructions import Outline, StageOutline, UnitOutline

W, B = ("weight",), ("weight", "bias")


def tied(blocks: int) -> Outline:
    """A GPT: the root unit is read by the embedding, whose backward reads nothing, and by the head."""
    names = [f"h.{i}" for i in range(blocks)]
    root = UnitOutline("root", True, ("table", "positions", "norm"))
    return Outline(
        (root, *(UnitOutline(name, False, B) for name in names)),
        (
            StageOutline("embed", ("root",), (), (("root", "table"), ("root", "positions"))),
            *(StageOutline(name, (name,), (name,), tuple((name, p) for p in B)) for name in names),
            StageOutline("head", ("root",), ("root",), (("root", "norm"), ("root", "table"))),
        ),
    )


def untied(blocks: int) -> Outline:
    """Every stage has a unit of its own, and none is kept."""
    names = ["embed", *(f"h.{i}" for i in range(blocks)), "head"]
    return Outline(
        tuple(UnitOutline(name, False, W) for name in names),
        tuple(StageOutline(name, (name,), () if name == "embed" else (name,), ((name, "weight"),)) for name in names),
    )


def two_units(blocks: int) -> Outline:
    """Every inner stage, of which there is one at least, also reads a streamed unit that all of them share."""
    names = [f"h.{i}" for i in range(max(1, blocks))]
    return Outline(
        (
            UnitOutline("shared", False, ("table",)),
            *(UnitOutline(name, False, B) for name in names),
            UnitOutline("out", False, W),
        ),
        (
            *(
                StageOutline(
                    name, ("shared", name), ("shared", name), (("shared", "table"), (name, "weight"), (name, "bias"))
                )
                for name in names
            ),
            StageOutline("head", ("out",), ("out",), (("out", "weight"),)),
        ),
    )


def frozen(blocks: int) -> Outline:
    """Half of the blocks and a part of the root have no gradients."""
    names = [f"h.{i}" for i in range(blocks)]
    params = {name: B if i % 2 else () for i, name in enumerate(names)}
    return Outline(
        (UnitOutline("root", True, ("norm",)), *(UnitOutline(name, False, params[name]) for name in names)),
        (
            StageOutline("embed", ("root",), (), ()),
            *(StageOutline(name, (name,), (name,), tuple((name, p) for p in params[name])) for name in names),
            StageOutline("head", ("root",), ("root",), (("root", "norm"),)),
        ),
    )


def parted(blocks: int) -> Outline:
    """A tied GPT of which some parameters are frozen, each part beside the rest of its unit; h.0 is frozen whole."""
    names = [f"h.{i}" for i in range(blocks)]
    beside = {name: f"{name}.frozen" for name in ("root", *names[1:])}
    read = {name: (name, beside[name]) if name in beside else (name,) for name in ("root", *names)}
    params = {name: ("weight",) if name in beside else () for name in names}
    return Outline(
        (
            UnitOutline("root", True, ("table",)),
            UnitOutline("root.frozen", True, (), "root"),
            *(
                unit
                for name in names
                for unit in (
                    UnitOutline(name, False, params[name]),
                    *(UnitOutline(other, False, (), name) for other in read[name][1:]),
                )
            ),
        ),
        (
            StageOutline("embed", read["root"], (), ()),
            *(StageOutline(name, read[name], read[name], tuple((name, p) for p in params[name])) for name in names),
            StageOutline("head", read["root"], read["root"], (("root", "table"),)),
        ),
    )


def loss_only(blocks: int) -> Outline:
    """One stage, the loss; ``blocks`` is not used."""
    return Outline(
        (UnitOutline("head", False, W),), (StageOutline("head", ("head",), ("head",), (("head", "weight"),)),)
    )


def bare(blocks: int) -> Outline:
    """Stages without parameters between stages with them."""
    names = [f"h.{i}" for i in range(blocks)]
    return Outline(
        (UnitOutline("first", True, W), UnitOutline("last", False, W)),
        (
            StageOutline("first", ("first",), ("first",), (("first", "weight"),)),
            *(StageOutline(name, (), (), ()) for name in names),
            StageOutline("last", ("last",), ("last",), (("last", "weight"),)),
        ),
    )


KINDS = {kind.__name__: kind for kind in (tied, untied, two_units, frozen, parted, loss_only, bare)}
