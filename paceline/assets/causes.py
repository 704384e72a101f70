"""Explains library errors about a model's files: known causes in clear words, others unchanged.

Library messages span several lines and mention the library's own argument names.
"""

from __future__ import annotations

import re
from typing import Final

from paceline.core.errors import in_one_line

_CAUSES: Final = (
    (
        r"trust_remote_code",
        "contains its own code, which only runs if trust_remote_code allows it; review the code first",
    ),
    (
        r"gated repo",
        "is gated: accept its terms on the hub, and set the variable HF_TOKEN to your token",
    ),
    (
        r"not a valid model identifier|Repository Not Found|RepositoryNotFound",
        "is not a folder, and the hub has no such model that HF_TOKEN may access",
    ),
    (
        r"couldn't connect|LocalEntryNotFound|offline mode|Name or service not known|ConnectError",
        "is not a folder and not in the download cache, and the hub cannot be reached",
    ),
    (
        r"model type `([^`]*)` but Transformers does not recognize",
        r"has the model type \1, which is unknown to this version of transformers; try a newer one",
    ),
    (
        r"instantiate the backend tokenizer|Can't load tokenizer|EntryNotFound.*tokenizer\.json",
        "has no readable tokenizer; copy its tokenizer files (tokenizer.json, …)",
    ),
)
"""A pattern in the error's text, and its explanation, which follows the model's name."""


def cause_of(name: str, failed: str, error: BaseException) -> str:
    """`name` and a known cause, else `name`, `failed` and the text of `error`."""
    said = f"{type(error).__name__}: {error}"
    for pattern, meaning in _CAUSES:
        match = re.search(pattern, said, re.DOTALL)
        if match is not None:
            return f"{name} {match.expand(meaning)}"
    return f"{name} {failed}: {in_one_line(error)}"
