"""The program: what the command line asks for, each part in a process of its own, the file of results."""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_check.parts import PARTS, Part, run
from gpu_check.report import FORMAT, Task, markdown, shown

__all__ = ["main"]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "gpu_check"
NAMES = [part.name for part in PARTS]
PASSED, FAILED, WRONG, NO_GPU = 0, 1, 2, 3
_GRACE = 5.0  # seconds that a part which is ended has to end its own processes
#: Words between Python and this script in every process that is started: a module that plays CuPy, in tests.
THROUGH = "MPISHARD_GPU_CHECK_THROUGH"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    if options.child:
        return _child(options)
    if options.rank:
        from gpu_check.ranks import as_rank

        as_rank(options.rank, options.device, options.steps, options.small, options.out)
        return PASSED
    if options.render:
        return _render(options.render)
    if unknown := [name for name in options.parts if name not in NAMES]:
        return _wrong(f"there is no part {unknown[0]!r}; the parts are {', '.join(NAMES)}")
    if not (options.limit > 0):
        return _wrong(f"--limit is {options.limit}; give seconds above 0")
    chosen = [part for part in PARTS if part.name in options.parts or not options.parts]
    if options.list:
        print(_listed(chosen))
        return PASSED
    if problem := _gpu_problem():
        print(f"No GPU can be used: {problem}\nThis would run:\n{_listed(chosen)}")
        return NO_GPU
    if problem := _device_problem(options.device):
        return _wrong(problem)
    stamp = datetime.now(timezone.utc)
    path = options.json or Path(f"gpu_check-{socket.gethostname()}-{stamp:%Y%m%d-%H%M%S}.json")
    try:
        path.touch()
    except OSError as error:
        return _wrong(f"{path} cannot be written ({error.strerror}); name another file with --json")
    if PARTS[0] not in chosen:
        chosen.insert(0, PARTS[0])
    return _run_all(chosen, options, path, stamp)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check mpishard on this machine's GPU against NumPy, and measure it.",
        epilog="Needs numpy, cupy and ml_dtypes, and no network. Exit code: 0 all that ran passed, 1 something failed, "
        "2 wrong arguments, 3 no GPU can be used.",
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run (default: all); --list names them")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for the results (gpu_check-HOST-DATE.json)")
    parser.add_argument("--limit", type=float, default=360.0, metavar="SECONDS", help="for all parts together (360)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="index of the GPU (0)")
    parser.add_argument("--render", type=Path, metavar="FILE", help="print a file of results as Markdown and end")
    for name, kind in (("--child", str), ("--rank", str), ("--out", Path), ("--known", Path), ("--seconds", float)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    return parser


def _wrong(problem: str) -> int:
    print(f"gpu_check: {problem}", file=sys.stderr)
    return WRONG


def _listed(parts: Sequence[Part]) -> str:
    width = max(len(part.name) for part in parts)
    return "\n".join(f"  {p.name:{width}}  {p.about}" + (f" (needs {p.needs})" if p.needs else "") for p in parts)


def _gpu_problem() -> str:
    """Say in one line why nothing can be run; empty where it can. Starts no context on a GPU."""
    try:
        import ml_dtypes  # noqa: F401
        import numpy  # noqa: F401
    except ImportError as error:
        return f"the package {error.name or 'numpy'} does not load ({error}); pip install numpy ml_dtypes"
    from mpishard.array.device import cuda_problem

    return cuda_problem()


def _device_problem(device: int) -> str:
    from cupy.cuda import runtime

    count = runtime.getDeviceCount()
    return "" if 0 <= device < count else f"there is no GPU {device}; {count} are visible, counted from 0"


def _render(path: Path) -> int:
    try:
        result = json.loads(path.read_text())
        if result["format"] > FORMAT:
            return _wrong(f"{path} has format {result['format']}, and this program reads {FORMAT}; use a newer one")
        print(markdown(result), end="")
    except OSError as error:
        return _wrong(f"{path} cannot be read ({error.strerror})")
    except (ValueError, KeyError, TypeError):
        return _wrong(f"{path} is no file of results of this program")
    return PASSED


# --- the parts, one after another


def _run_all(chosen: Sequence[Part], options: argparse.Namespace, path: Path, stamp: datetime) -> int:
    result = _head(options, stamp)
    results: list[dict[str, Any]] = result["parts"]
    begin = time.monotonic()
    code = PASSED
    try:
        for part in chosen:
            left = options.limit - (time.monotonic() - begin)
            if left < part.expected and part.name != "machine":
                why = f"{max(left, 0):.0f} of {options.limit:.0f} s are left and it takes about {part.expected:.0f}"
                results.append({"name": part.name, "status": "skipped", "why": why, "seconds": 0.0})
            else:
                if sys.stderr.isatty():
                    print(f"{part.name} ...", end="\r", file=sys.stderr, flush=True)
                results.append(_start(part, options, results, left))
            print(shown(results[-1]), flush=True)
            _save(path, result)
    except KeyboardInterrupt:
        print("gpu_check: interrupted; what was found until now is kept", file=sys.stderr)
        code = 128 + signal.SIGINT
    counts = {s: sum(r["status"] == s for r in results) for s in ("passed", "failed", "skipped")}
    result["seconds"] = time.monotonic() - begin
    _save(path, result)
    print(", ".join(f"{count} {status}" for status, count in counts.items()), f"in {result['seconds']:.0f} s: {path}")
    return code or (FAILED if counts["failed"] else PASSED)


def _head(options: argparse.Namespace, stamp: datetime) -> dict[str, Any]:
    import mpishard

    return {
        "format": FORMAT,
        "date": f"{stamp:%Y-%m-%dT%H:%M:%SZ}",
        "mpishard": mpishard.__version__,
        "commit": _commit(),
        "command": shlex.join(["gpu_check", *sys.argv[1:]]),
        "small": options.small,
        "parts": [],
    }


def _commit() -> str | None:
    """Return the commit of the checkout, and whether files differ from it; None where git does not say."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _save(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def _python() -> list[str]:
    return [sys.executable, *shlex.split(os.environ.get(THROUGH, "")), str(SCRIPT)]


def _start(part: Part, options: argparse.Namespace, results: list[dict[str, Any]], left: float) -> dict[str, Any]:
    """Run a part in a process of its own; a fault there is a result here."""
    seconds, begin = min(part.most, max(left, part.expected)), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        known, out, log = (Path(folder) / name for name in ("known.json", "out.json", "log"))
        known.write_text(json.dumps({r["name"]: r.get("figures", {}) for r in results}))
        command = [*_python(), "--child", part.name, "--device", str(options.device), "--seconds", f"{seconds - 1:.1f}"]
        command += ["--out", str(out), "--known", str(known), *["--small"] * options.small]
        with log.open("w") as file:
            child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(child)
        if out.exists():
            return dict(json.loads(out.read_text()))
        said = log.read_text(errors="replace").strip().splitlines()
    if code is None and seconds < part.most:
        status, why = "skipped", f"the limit of {options.limit:.0f} s was reached after {seconds:.0f} s of it"
    elif code is None:
        status, why = "failed", f"it was not done after {seconds:.0f} s"
    else:
        status, why = "failed", f"its process ended with exit code {code}"
    found = {"name": part.name, "status": status, "why": why, "seconds": time.monotonic() - begin}
    return found | {"traceback": "\n".join(said[-20:])}


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part and what it started: first asked, so that a launcher ends its ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, number)
            try:
                child.wait(_GRACE)
            except subprocess.TimeoutExpired:
                continue


def _child(options: argparse.Namespace) -> int:
    part = next(part for part in PARTS if part.name == options.child)
    known = json.loads(options.known.read_text()) if options.known else {}
    task = Task(options.device, options.small, options.seconds or part.most, known, tuple(_python()))
    faulthandler.dump_traceback_later(max(1.0, task.seconds - 1))  # what it hangs in, if it does
    found = run(part, task)
    faulthandler.cancel_dump_traceback_later()
    whole = options.out.with_suffix(".part")
    whole.write_text(json.dumps(found, allow_nan=False))
    whole.rename(options.out)  # a part that is ended while it writes has written nothing
    return PASSED
