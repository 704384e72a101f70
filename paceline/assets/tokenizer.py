"""A model's tokenizer, by the name that the model goes by."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline import assets
from paceline.assets.causes import cause_of
from paceline.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(name: str, field: str) -> Tokenizer:
    """From a folder, a tokenizer.json, or a hub id. Raises InvalidArgumentError naming `field`.

    Texts are read whole, as transformers reads them unless it is told otherwise: truncation and padding that
    a tokenizer.json asks for were of its training.
    """
    from tokenizers import Tokenizer

    path = Path(assets.resolve(name))
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise InvalidArgumentError(
            field, cause_of(name, "has no tokenizer.json that can be loaded", error)
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
