"""Checks that a checkpoint's weights are safetensors files, since other formats can run code.

transformers chooses the reader by each file's name, and takes names from the checkpoint itself: from its
index and its configuration. Therefore all of them are checked before anything is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Final

from transformers.utils.hub import cached_file

from paceline.core.errors import InvalidArgumentError, in_one_line

_SUFFIX: Final = ".safetensors"
_INDEX_SUFFIX: Final = ".safetensors.index.json"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_ADAPTER: Final = "adapter_config.json"
_EXPLICIT: Final = "transformers_weights"
"""The entry of a config.json that names an unusual weights file or index."""


def refuse_single_file(name: str) -> None:
    """Refuse a single file, whose weights transformers would read in any format.

    Raises InvalidArgumentError naming `model`.
    """
    if Path(name).is_file():
        raise InvalidArgumentError("model", f"{name} is a file: a model is a folder or a hub id")


def check_weights(name: str, config: Any) -> None:
    """Refuse a checkpoint, local or on the hub, whose weights are not safetensors files of its own.

    `config` is its loaded configuration. Raises InvalidArgumentError naming `model` and the file at fault.
    """
    if _find(name, _ADAPTER) is not None:
        raise InvalidArgumentError(
            "model", f"{name} has an adapter ({_ADAPTER}): merge it into its model, adapters are not loaded"
        )
    explicit = getattr(config, _EXPLICIT, None)
    if explicit is not None:
        _check_name(name, f"{_EXPLICIT} of its configuration", explicit, (_SUFFIX, _INDEX_SUFFIX))
    for index in _indexes(name, explicit):
        for file in _named_in(name, index):
            _check_name(name, index.name, file, (_SUFFIX,))
            _check_link(name, index.parent / file)
    if Path(name).is_dir():
        for file in {_WEIGHTS, explicit or _WEIGHTS}:
            _check_link(name, Path(name) / file)


def _indexes(name: str, explicit: str | None) -> Iterator[Path]:
    """All index files of a folder, including those of variants; for the hub, those that can be selected."""
    if Path(name).is_dir():
        yield from sorted(Path(name).glob(f"*{_INDEX_SUFFIX}"))
        return
    for file in {_INDEX, explicit or _INDEX}:
        if file.endswith(_INDEX_SUFFIX) and (found := _find(name, file)) is not None:
            yield Path(found)


def _find(name: str, file: str) -> str | None:
    """The local path of a file, fetched from the hub if necessary; None if it does not exist.

    Raises InvalidArgumentError naming `model` if the hub does not answer.
    """
    try:
        found: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    except OSError as error:
        raise InvalidArgumentError(
            "model", f"{file} of {name} cannot be looked up: {in_one_line(error)}"
        ) from error
    return found


def _named_in(name: str, index: Path) -> Iterable[Any]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("model", f"{index.name} of {name} is not JSON") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict):
        raise InvalidArgumentError("model", f"{index.name} of {name} has no object weight_map")
    # Without deduplication: values that are not strings may be unhashable.
    return names.values()


def _check_name(name: str, where: str, file: Any, suffixes: tuple[str, ...]) -> None:
    plain = isinstance(file, str) and PurePosixPath(file).name == PureWindowsPath(file).name == file
    if not (plain and file.endswith(suffixes)):
        raise InvalidArgumentError(
            "model", f"{where} of {name} names {file!r}: weights are read from {_SUFFIX} files beside it only"
        )


def _check_link(name: str, file: Path) -> None:
    """Check that a link leads to another safetensors file, or to the content folder of a hub cache.

    Files there have no suffix: folder/snapshots/REVISION/FILE is a link to folder/blobs/HASH.
    """
    if not file.is_symlink():
        return
    target, folder = file.resolve(), file.parent.resolve()
    store = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.suffix != _SUFFIX and target.parent != store:
        raise InvalidArgumentError(
            "model", f"{file.name} of {name} is a link to {target}, which is not a {_SUFFIX} file"
        )
