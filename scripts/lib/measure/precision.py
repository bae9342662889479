"""Do 16 bits change a run more in mpishard than in PyTorch? Curves of loss, and their distances from fp32."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from measure.curves import OURS, THEIRS, Task, difference, ours, theirs
from measure.table import rows
from mpishard.models.gpt2 import Gpt2

__all__ = ["BAR", "PYTORCH", "main", "ratios"]

#: our distance of 16 bits from fp32, of PyTorch's
BAR = 2.0
#: what is called PyTorch's own bf16 here: parameters and activations in 16 bits as in mpishard
PYTORCH = "fsdp2"
SHOWN = 10  # losses of each curve

Curves = dict[str, list[float]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="compare_precision",
        description="Train a small GPT on the default corpus in each precision, in mpishard and in PyTorch, and "
        "compare the curves of loss: initial weights, data, AdamW and learning rates are the same.",
        epilog="Exit code: 0 the mean absolute distance of our bf16 and fp16 from our fp32 is at most "
        f"{BAR:g} times that of PyTorch's bf16 from its fp32; 1 it is more; 2 PyTorch is not installed.",
    )
    sizes = Task().sizes
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of training (200)")
    parser.add_argument("--batch", type=int, default=Task().batch, metavar="N", help="sequences of a step (8)")
    parser.add_argument("--layers", type=int, default=sizes.layers, metavar="N", help=f"blocks ({sizes.layers})")
    parser.add_argument("--width", type=int, default=sizes.width, metavar="N", help=f"features ({sizes.width})")
    parser.add_argument("--sequence", type=int, default=sizes.sequence, metavar="N", help=f"tokens ({sizes.sequence})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (0)")
    parser.add_argument("--ours", nargs="+", choices=OURS[1:], default=list(OURS[1:]), help="of mpishard (both)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the curves")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("compare_precision: PyTorch is not installed; pip install torch", file=sys.stderr)
        return 2
    import torch

    torch.set_num_threads(1)
    sizes = replace(sizes, layers=options.layers, width=options.width, sequence=options.sequence)
    task = Task(sizes, options.batch, options.steps, seed=options.seed)
    print(f"{_described(sizes)}; {task.batch} sequences a step, {task.steps} steps, seed {task.seed}")
    print(f"PyTorch {torch.__version__}")
    mine = _curves("mpishard", ours, ("fp32", *options.ours), task)
    others = _curves("PyTorch", theirs, THEIRS, task)
    if options.json:
        options.json.write_text(json.dumps({"mpishard": mine, "PyTorch": others}) + "\n")
    return int(_report(mine, others) > BAR)


def ratios(mine: Curves, others: Curves, kind: str = PYTORCH) -> dict[str, float]:
    """Return the distance of each of our 16-bit curves from our fp32, over PyTorch's."""
    unit = difference(others[kind], others["fp32"])
    return {name: difference(curve, mine["fp32"]) / unit for name, curve in mine.items() if name != "fp32"}


def _described(sizes: Gpt2) -> str:
    return f"GPT of {sizes.layers} blocks, width {sizes.width}, sequences of {sizes.sequence} bytes"


def _curves(system: str, run: Callable[[Task, str], list[float]], kinds: Sequence[str], task: Task) -> Curves:
    found = {}
    for kind in kinds:
        begin = time.perf_counter()
        found[kind] = run(task, kind)
        seconds = time.perf_counter() - begin
        shown = " ".join(f"{loss:.4f}" for loss in found[kind][:: max(1, task.steps // SHOWN)])
        print(f"{system + ' ' + kind:17} {shown} .. {found[kind][-1]:.4f}  ({seconds:.0f} s)", flush=True)
    return found


def _report(mine: Curves, others: Curves) -> float:
    """Print distances and ratios; return the largest ratio to PyTorch's own bf16."""
    base = difference(mine["fp32"], others["fp32"])
    print(f"\nmean absolute distance from the system's own fp32 (their fp32 curves are {base:.1e} apart)")
    distances = [(f"PyTorch bf16, {kind}", difference(others[kind], others["fp32"])) for kind in THEIRS[1:]]
    lines = [[name, f"{far:.2e}", "", ""] for name, far in distances]
    found, loose = (ratios(mine, others, kind) for kind in THEIRS[1:])
    for name, ratio in found.items():
        far = difference(mine[name], mine["fp32"])
        lines.append([f"mpishard {name}", f"{far:.2e}", f"{ratio:.2f}", f"{loose[name]:.2f}"])
    print(rows(("curve", "distance", "/ fsdp2", "/ autocast"), lines))
    worst = max(found.values())
    print(
        "fsdp2: MixedPrecisionPolicy(bf16 parameters and activations, fp32 reduction), fp32 masters and loss;\n"
        "autocast: matrix products in bf16, all between them in fp32\n"
        f"at most {worst:.2f} of PyTorch's own bf16 (fsdp2), {'within' if worst <= BAR else 'ABOVE'} the bar of {BAR:g}"
    )
    return worst
