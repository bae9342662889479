"""The rooms of mpishard and the doors between them (docs/architecture.md): what a module may import.

Doors open downward only. Imports inside functions count like those at the top; imports under ``if TYPE_CHECKING``
are for types and do not, except that torch stays out altogether.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: What each room may open. Rooms of one level stay apart: what two of them need moves down.
BELOW_SHARD = {"comm", "nn", "array", "errors", "launched"}
BELOW_TRAIN = {"checkpoint", "data", "optim", "shard", "models", *BELOW_SHARD}
DOORS: dict[str, set[str]] = {
    "errors": set(),
    "launched": set(),
    "pictures": {"errors"},
    "array": {"errors"},
    "nn": {"array", "errors"},
    "comm": {"array", "errors", "launched"},
    "models": {"nn", "array", "errors"},
    "shard": BELOW_SHARD,
    "checkpoint": {"shard", *BELOW_SHARD},
    "data": {"shard", *BELOW_SHARD},
    "optim": {"shard", *BELOW_SHARD},
    "plan": {"pictures", *BELOW_TRAIN},
    "bench": {"pictures", "train", *BELOW_TRAIN},
    "doctor": {"train", *BELOW_TRAIN},
    "timeline": {"pictures", *BELOW_TRAIN},
    "testing": {"models", "optim", "shard", *BELOW_SHARD},
    "train": BELOW_TRAIN,
    "cli": {"pictures", "train", "bench", "doctor", "plan", "timeline", *BELOW_TRAIN},
    "__main__": {"cli"},
}
#: Packages that only these rooms may open.
OUTSIDE_DOORS: dict[str, set[str]] = {"mpi4py": {"comm"}, "cupy": {"array", "comm"}, "torch": set()}
#: Modules that are plain arithmetic: no array library, nor a module that imports one.
PURE = ("shard.layout", "shard.schedule", "shard.place", "shard.text", "data.sampler")
ARRAY_LIBRARIES = {"numpy", "cupy"}
MAX_LINES = 400


@dataclass(frozen=True)
class Import:
    """One imported module, absolute: ``mpishard.shard.layout`` or ``numpy``; where it stands; whether for types."""

    target: str
    line: int
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """One file of the package, by its name below it: ``shard.layout``, ``shard`` for the room's ``__init__``."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]


def read_package(package: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
    return modules


def is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(module: Module, known: dict[str, Module]) -> Iterator[Import]:
    """Yield what a module imports, also by ``import_module("...")``."""
    is_package = module.path.name == "__init__.py"
    package = ["mpishard", *module.name.split(".")] if module.name else ["mpishard"]

    def visit(node: ast.AST, typing_only: bool) -> Iterator[Import]:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            ups = node.level - is_package
            base = ".".join(package[: len(package) - ups]) if node.level else ""
            source = ".".join(filter(None, [base, node.module]))
            # ``from mpishard.shard import layout`` imports the module, not a name of the room.
            inner = [f"{source}.{alias.name}" for alias in node.names]
            targets = [name if name.removeprefix("mpishard.") in known else source for name in inner]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                targets = [node.args[0].value]
        yield from (Import(target, node.lineno, typing_only) for target in dict.fromkeys(targets))
        guarded = set(map(id, node.body)) if isinstance(node, ast.If) and is_type_checking(node) else set()
        for child in ast.iter_child_nodes(node):
            yield from visit(child, typing_only or id(child) in guarded)

    yield from visit(module.tree, False)


def closed_doors(modules: dict[str, Module]) -> list[str]:
    """Say which imports go through a door that does not exist."""
    problems = []
    for module in modules.values():
        if module.name and module.room not in DOORS:
            problems.append(f"{module.path}: {module.room} is no room; add it to DOORS at its level")
            continue
        for found in imports_of(module, modules):
            top, _, rest = found.target.partition(".")
            room = rest.partition(".")[0]
            if top == "mpishard":
                closed = room not in ("", module.room) and room in DOORS and room not in DOORS.get(module.room, set())
                closed = closed and not found.typing_only
            else:
                closed = module.room not in OUTSIDE_DOORS.get(top, {module.room})
                closed = closed and (top == "torch" or not found.typing_only)
            if closed:
                problems.append(f"{module.path}:{found.line}: {module.name or 'mpishard'} imports {found.target}")
    return problems


def impurities(modules: dict[str, Module], name: str) -> list[str]:
    """Return the ways in which a module comes to import an array library."""
    problems, ways = [], {name: name}
    pending = [name]
    while pending:
        current = pending.pop()
        for found in imports_of(modules[current], modules):
            below = found.target.removeprefix("mpishard.")
            if found.typing_only:
                continue
            if found.target.partition(".")[0] in ARRAY_LIBRARIES:
                problems.append(f"{ways[current]} -> {found.target}")
            elif below != found.target and below in modules and below not in ways:
                ways[below] = f"{ways[current]} -> {below}"
                pending.append(below)
    return problems


def names_of(module: Module) -> tuple[set[str], set[str], list[str] | None]:
    """Return the public names that a module defines, those that it imports, and its ``__all__``."""
    defined: set[str] = set()
    imported: set[str] = set()
    exported = None
    # What is imported for types only is loaded when it is asked for, by the module's __getattr__.
    lazily = [child for node in module.tree.body if is_type_checking(node) for child in getattr(node, "body", [])]
    loads = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in module.tree.body)
    for node in [*module.tree.body, *(lazily if loads else [])]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
            if "__all__" in names and node.value is not None:
                exported = ast.literal_eval(node.value)
            if not (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "TypeVar"):
                defined |= names
    return {name for name in defined if not name.startswith("_")}, imported, exported


def wrong_exports(modules: dict[str, Module]) -> list[str]:
    """Say where ``__all__`` is missing or not the list of public names; ruff (RUF022) sees to its order."""
    problems = []
    for module in modules.values():
        public, imported, exported = names_of(module)
        if exported is None:
            if public:
                problems.append(f"{module.path}: no __all__ for {', '.join(sorted(public))}")
            continue
        if missing := public - set(exported):
            problems.append(f"{module.path}: __all__ lacks {', '.join(sorted(missing))}")
        strangers = {name for name in exported if name not in public | imported and not name.startswith("__")}
        # A room may name its modules.
        strangers = {name for name in strangers if f"{module.name}.{name}".lstrip(".") not in modules}
        if strangers:
            problems.append(f"{module.path}: __all__ names {', '.join(sorted(strangers))}, which it does not have")
    return problems


def none_of(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems).replace(f"{ROOT}/", "")


@pytest.fixture(scope="module")
def modules() -> dict[str, Module]:
    return read_package(ROOT / "mpishard")


def test_doors_open_downward_only(modules: dict[str, Module]) -> None:
    none_of(closed_doors(modules))


def test_layout_schedule_place_and_sampler_need_no_array_library(modules: dict[str, Module]) -> None:
    none_of([way for name in PURE if name in modules for way in impurities(modules, name)])


def test_every_module_lists_its_public_names(modules: dict[str, Module]) -> None:
    none_of(wrong_exports(modules))


def test_files_stay_readable_in_one_sitting() -> None:
    sources = [p for top in ("mpishard", "scripts", "tests") for p in (ROOT / top).rglob("*") if p.is_file()]
    sources = [path for path in sources if path.suffix in (".py", ".cu", ".sh") or path.parent.name == "scripts"]
    lengths = [(len(path.read_text().splitlines()), path) for path in sources]
    none_of([f"{path}: {lines} lines, over {MAX_LINES}" for lines, path in lengths if lines > MAX_LINES])


def test_no_module_is_a_drawer_for_anything(modules: dict[str, Module]) -> None:
    none_of([name for name in modules if {"util", "utils"} & set(name.split("."))])


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, mpishard; print(*{'numpy', 'mpi4py', 'pydantic', 'click', 'cupy'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.split() == []


PLANTED = {
    "nn/up.py": "from mpishard.shard import engine",
    "nn/relative.py": "def f():\n    from ..comm.base import Communicator",
    "nn/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from mpishard.shard import engine",
    "nn/other.py": "if TYPE_CHECKING:\n    pass\nelse:\n    import mpishard.models",
    "shard/engine.py": "import numpy\nfrom mpishard.comm import base\nX = 1",
    "shard/layout.py": "from . import engine\n__all__ = ['b']",
    "comm/base.py": "import mpi4py.MPI, cupy\n_x = 1",
    "train/loop.py": "import importlib\nimportlib.import_module('mpi4py')\nif TYPE_CHECKING:\n    import torch",
    "spare/x.py": "",
}


@pytest.fixture
def planted(tmp_path: Path) -> dict[str, Module]:
    for name, source in PLANTED.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return read_package(tmp_path)


def test_a_closed_door_is_found_wherever_the_import_stands(planted: dict[str, Module]) -> None:
    found = [problem.partition(": ")[2] for problem in closed_doors(planted)]
    assert found == [
        "nn.other imports mpishard.models",
        "nn.relative imports mpishard.comm.base",
        "nn.up imports mpishard.shard.engine",
        "spare is no room; add it to DOORS at its level",
        "train.loop imports mpi4py",
        "train.loop imports torch",
    ]


def test_an_array_library_is_found_behind_other_modules(planted: dict[str, Module]) -> None:
    assert impurities(planted, "shard.layout") == [
        "shard.layout -> shard.engine -> numpy",
        "shard.layout -> shard.engine -> comm.base -> cupy",
    ]


def test_wrong_lists_of_public_names_are_found(planted: dict[str, Module]) -> None:
    found = {problem.partition(": ")[2] for problem in wrong_exports(planted)}
    assert found == {"__all__ names b, which it does not have", "no __all__ for X", "no __all__ for f"}
