"""A check that the processes' packages are Paceline's.

The wheel has four top-level packages: `paceline`, `coordinator`, `draft_worker` and `target_worker`. Another
package or a local folder with one of these names can shadow them on Python's path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from paceline.core.errors import UnavailableError


def check_ours(name: str) -> None:
    """Raises UnavailableError naming the file that shadows the package."""
    expected = Path(__file__).parents[3] / name
    found = _place(name)
    if found is None:
        raise UnavailableError(f"Paceline's package {name} is not installed: {expected} not found")
    if not _same(found, expected):
        raise UnavailableError(
            f"{found} shadows Paceline's package {name} ({expected}) on Python's path. "
            f"Remove or rename it, or start from another folder"
        )


def _place(name: str) -> Path | None:
    """The folder or file of the package, imported or not."""
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
