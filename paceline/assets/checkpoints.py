"""Local checks of a model's name and folder, before any library is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Final

from paceline import assets
from paceline.core.errors import InvalidArgumentError

_HUB_ID: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
"""transformers needs at least one of these files to build a tokenizer."""


def check_model(field: str, name: str) -> None:
    """Raises InvalidArgumentError naming `field` for a missing path, an incomplete folder or an invalid hub
    id. Valid hub ids pass, because only the hub knows whether they exist."""
    folder = Path(assets.resolve(name, field))
    if folder.is_dir():
        _check_folder(field, folder)
    else:
        _check_absent(field, name, "folder")


def check_tokenizer(field: str, name: str) -> None:
    """As check_model, for a coordinator's tokenizer: a folder with tokenizer.json, or that file."""
    path = Path(assets.resolve(name, field))
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise InvalidArgumentError(field, f"{name} has no tokenizer.json; {_FAST}")
    elif not path.is_file():
        _check_absent(field, name, "file or folder")


_FAST: Final = (
    "`AutoTokenizer.from_pretrained(…).save_pretrained(FOLDER)` of transformers writes one if the model's "
    "tokenizer supports it"
)


def weight_bytes(name: str) -> int | None:
    """Size of a model's weights as its files have them; None if they are not on this machine.

    `name` is a folder, a hub id that was fetched before, or an embedded model.
    """
    folder = Path(assets.resolve(name))
    if not folder.is_dir():
        found = _fetched(name)
        if found is None:
            return None
        folder = found
    size = _indexed_bytes(folder / "model.safetensors.index.json")
    if not size:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else list(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
    return size * assets.scale_of(name) or None


def _fetched(hub_id: str) -> Path | None:
    """The folder of a model that the hub's library keeps."""
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(hub_id, "config.json")
    except (ImportError, ValueError):  # not installed; not a hub id
        return None
    return Path(config).parent if isinstance(config, str) else None


def _indexed_bytes(index: Path) -> int:
    """The size that an index of several files states; 0 without one."""
    try:
        size = json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return size if isinstance(size, int) else 0


def looks_like_a_path(name: str) -> bool:
    """Whether a name is meant as a path: a hub id is a word, or two with a slash between them."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or Path(name).exists()


def _check_absent(field: str, name: str, kind: str) -> None:
    """Raises for a name that is not on the disk, unless it is a valid hub id."""
    if looks_like_a_path(name):
        raise InvalidArgumentError(field, _why_absent(name, kind))
    if not _HUB_ID.fullmatch(name):
        raise InvalidArgumentError(field, f"{name!r} is neither a {kind} nor a hub id (owner/name)")


def _why_absent(name: str, kind: str) -> str:
    path = Path(name)
    if name.startswith("~"):
        return f"{name}: the shell expands ~ only at the beginning of a word; use {path.expanduser()}"
    if path.is_file():
        return f"{name} is a file; a model is a folder with config.json and safetensors"
    there = path.absolute()
    while not there.exists():
        there = there.parent
    at = "" if path.is_absolute() else f" in {Path.cwd()}"
    return f"{name}: no such {kind}{at}; the path exists up to {there}"


def _check_folder(field: str, folder: Path) -> None:
    def lacks(what: str) -> InvalidArgumentError:
        return InvalidArgumentError(field, f"{folder} {what}")

    if not (folder / "config.json").is_file():
        if (folder / "adapter_config.json").is_file():
            raise lacks("is an adapter, not a model: merge it into its base model's weights first")
        if any(folder.glob("*.gguf")):
            raise lacks("contains a GGUF model, which is not supported; use its original safetensors")
        raise lacks("has no config.json, so it is not a model's folder")
    if not any(folder.glob("*.safetensors")):
        if any((*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth"))):
            raise lacks("has pickled weights, which are never loaded; save them as safetensors")
        raise lacks("has no weights (*.safetensors)")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise lacks("has no tokenizer; copy its tokenizer files (tokenizer.json, …)")
