"""The error of a round without a verdict."""

from __future__ import annotations

import math

import torch

from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from target_worker.acceptance.items import VerifyItem
from target_worker.verdicts import with_logprobs
from target_worker.verify import NO_CHOICE, verify_items


def test_a_missing_verdict_names_both_possible_reasons() -> None:
    """No permitted token is possible, or logits are NaN."""
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(1,), seed=1)
    item = VerifyItem(SequenceParams(sampling, AcceptanceMode.COUPLED, 2), (2, 3), Proposal())
    for row in ([0.0, -math.inf, 0.0, 1.0], [math.nan] * 4):
        logits = torch.tensor([row])
        assert with_logprobs([item], logits, verify_items([item], logits, logits)) == [None]
    assert NO_CHOICE == "the target model's logits are not numbers, or leave no token to choose"
