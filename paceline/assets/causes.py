"""Why a model's files could not be loaded, from what a library raised: known causes in
our words, all else whole.

Libraries say it over several lines, of which each alone may mean little, and with their own arguments' names.
"""

from __future__ import annotations

import re
from typing import Final

from paceline.core.errors import in_one_line

_CAUSES: Final = (
    (
        r"trust_remote_code",
        "comes with code of its own, which is not run unless trust_remote_code allows it; read it first",
    ),
    (
        r"gated repo",
        "is gated: accept its terms on the hub, and set the variable HF_TOKEN to a token of yours",
    ),
    (
        r"not a valid model identifier|Repository Not Found|RepositoryNotFound",
        "is no folder here, and the hub has no such model, or none that HF_TOKEN may see",
    ),
    (
        r"couldn't connect|LocalEntryNotFound|offline mode|Name or service not known|ConnectError",
        "is no folder here and not among the files that were fetched before, and the hub cannot be reached",
    ),
    (
        r"model type `([^`]*)` but Transformers does not recognize",
        r"has the model type \1, which this version of transformers does not know; a newer one may",
    ),
    (
        r"instantiate the backend tokenizer|Can't load tokenizer|EntryNotFound.*tokenizer\.json",
        "has no tokenizer that can be read; copy the files that it came with (tokenizer.json, …)",
    ),
)
"""What such an error says somewhere, and what it means for the model whose name is put before it."""


def cause_of(name: str, failed: str, error: BaseException) -> str:
    """The whole sentence: `name` and a known cause, or `name`, what `failed`, and all that `error` says."""
    said = f"{type(error).__name__}: {error}"
    for pattern, meaning in _CAUSES:
        match = re.search(pattern, said, re.DOTALL)
        if match is not None:
            return f"{name} {match.expand(meaning)}"
    return f"{name} {failed}: {in_one_line(error)}"
