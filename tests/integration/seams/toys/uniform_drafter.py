"""A drafter whose q is uniform over the vocabulary: it proposes random tokens."""

from __future__ import annotations

import torch

from draft_worker.drafters.interface import Drafter, DrafterKind
from draft_worker.drafters.registry import DRAFTERS
from draft_worker.drafters.tokens import TokenDrafter
from paceline.core.clock import Clock
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built, build_vocabulary

NAME = "uniform"


def uniform_drafter(built: Built, config: DraftConfig, clock: Clock) -> Drafter:
    """The same score for every token, whatever the text is."""
    width = built.loaded.vocab_size
    return TokenDrafter(lambda texts: torch.zeros(len(texts), width), config, clock)


def register() -> None:
    DRAFTERS[NAME] = DrafterKind(build_vocabulary, uniform_drafter)
