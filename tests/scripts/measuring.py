"""The modules of scripts/lib/measure, as the programs in scripts/ import them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import mpishard

ROOT = Path(mpishard.__file__).parents[1]
LIBRARY = ROOT / "scripts" / "lib"


def module(name: str) -> Any:
    """A module of scripts/lib/measure."""
    sys.path.insert(0, str(LIBRARY))
    try:
        return importlib.import_module(f"measure.{name}")
    finally:
        sys.path.remove(str(LIBRARY))
