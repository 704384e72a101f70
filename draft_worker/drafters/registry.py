"""The drafters by the names that `--drafter` takes."""

from __future__ import annotations

from typing import Final

from draft_worker.drafters import stacked
from draft_worker.drafters.bigram import bigram
from draft_worker.drafters.interface import DrafterKind
from draft_worker.drafters.model import ModelDrafter, load
from draft_worker.drafters.ngram import ngram
from draft_worker.drafters.random_tokens import random_tokens
from draft_worker.drafters.tokens import of_scorers
from draft_worker.drafters.unigram import unigram
from paceline.core.config import MODEL_DRAFTER, DraftConfig
from paceline.core.errors import InvalidArgumentError

DRAFTERS: Final[dict[str, DrafterKind]] = {
    MODEL_DRAFTER: DrafterKind(load, ModelDrafter.of),
    "unigram": of_scorers(unigram, may_lack_context=False, reads_corpus=True),
    "bigram": of_scorers(bigram, reads_corpus=True),
    "ngram": of_scorers(ngram),
    "random": of_scorers(random_tokens, may_lack_context=False),
}


def kind_of(config: DraftConfig) -> DrafterKind:
    """The drafter that a configuration names.

    Raises InvalidArgumentError naming `drafter`, or `corpus` if the drafter does not read one.
    """
    name, colon, parts = config.drafter.partition(":")
    of_parts = bool(colon) and name == stacked.NAME
    kind = stacked.stacked(parts.split("+"), DRAFTERS) if of_parts else DRAFTERS.get(config.drafter)
    if kind is None:
        known = f"{', '.join(DRAFTERS)}, or {stacked.NAME}:a+b"
        raise InvalidArgumentError("drafter", f"must be one of {known}, got {config.drafter!r}")
    if config.corpus and not kind.reads_corpus:
        raise InvalidArgumentError("corpus", f"is not read by the drafter {config.drafter}")
    return kind
