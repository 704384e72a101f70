"""Loading a model's tokenizer by the model's name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline import assets
from paceline.assets.causes import cause_of
from paceline.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load_tokenizer(name: str, field: str) -> Tokenizer:
    """Load from a folder, a tokenizer.json, or a hub id. Raises InvalidArgumentError naming `field`.

    Truncation and padding in a tokenizer.json were for training and are switched off, as in transformers.
    """
    from tokenizers import Tokenizer

    path = Path(assets.resolve(name))
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises plain Exception
        raise InvalidArgumentError(field, cause_of(name, "has no loadable tokenizer.json", error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
