"""That the processes' packages are Paceline's own: their names are common ones.

The wheel has four top-level packages: `paceline`, `coordinator`, `draft_worker` and `target_worker`. Another
package of one of these names, or a folder in the working folder, can come first on Python's path.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from paceline.core.errors import UnavailableError


def check_ours(name: str) -> None:
    """Raises UnavailableError naming the file that would be imported as the package instead of ours."""
    expected = Path(__file__).parents[3] / name
    found = _place(name)
    if found is None:
        raise UnavailableError(f"the package {name} of Paceline is not installed: {expected} is not there")
    if not _same(found, expected):
        raise UnavailableError(
            f"{found} is imported as {name}, not {expected} of Paceline: it comes first on Python's path. "
            f"Work in another folder, or remove or rename it"
        )


def _place(name: str) -> Path | None:
    """The folder or file that the package comes from, imported or not."""
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
