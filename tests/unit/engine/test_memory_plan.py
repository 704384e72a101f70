"""The division of a GPU's memory, in exact bytes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.engine.memory_plan import Card, MemoryPlan, Needs, plan_memory

GIB = 1 << 30
MIB = 1 << 20
NEEDS = Needs(weights=10 * GIB, passes=2 * GIB, graphs=1 * GIB, block=MIB)
CARD = Card("cuda:0", total=80 * GIB, free=62 * GIB)
"""Other processes have 8 GiB of it."""


def plan(needs: Needs = NEEDS, card: Card = CARD, **asked: Any) -> MemoryPlan:
    return plan_memory(needs, card, **{"most_blocks": 1 << 30, **asked})


def refusal(needs: Needs = NEEDS, card: Card = CARD, **asked: Any) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as refused:
        plan(needs, card, **asked)
    return refused.value


def test_a_share_is_of_the_whole_gpu_less_everything_else() -> None:
    made = plan(share=0.5)
    assert made.num_blocks == (40 - 13) * 1024
    assert made == MemoryPlan(80 * GIB, 10 * GIB, 27 * GIB, 1 * GIB, 2 * GIB, made.num_blocks)
    assert made.planned == 40 * GIB


def test_the_default_is_a_share_of_what_is_free() -> None:
    assert plan().num_blocks == (int(62 * GIB * 0.85) - 3 * GIB) // MIB
    assert plan().planned <= 10 * GIB + 62 * GIB * 0.85 < plan().planned + MIB


def test_blocks_of_no_use_are_left_out() -> None:
    assert plan(most_blocks=7).num_blocks == 7
    assert plan(most_blocks=7).cache == 7 * MIB


def test_a_plan_is_told_in_parts() -> None:
    assert str(plan(share=0.5)) == (
        "80.0 GiB of GPU memory: weights 10.0 GiB, cache 27.0 GiB, recordings 1.0 GiB, "
        "passes and logits 2.0 GiB, not planned 40.0 GiB"
    )


@pytest.mark.parametrize(
    ("share", "told"),
    [
        (0.95, "only 62.0 GiB are free for the rest: ask for at most 0.90"),
        (0.125, "0.125 of the 80.0 GiB of cuda:0 are 10.0 GiB, without room for a cache beside 10.0 GiB of"),
        (0.125, "ask for at least 0.17, or for less: fewer --max-batch-tokens"),
    ],
)
def test_an_impossible_share_is_refused_with_one_that_fits(share: float, told: str) -> None:
    refused = refusal(share=share)
    assert refused.field == "gpu_memory_utilization"
    assert told in refused.message
    for fitting in (0.17, 0.90):
        assert plan(share=fitting).num_blocks >= 1


def test_a_default_without_room_names_a_share_that_has_it() -> None:
    card = Card("cuda:0", total=24 * GIB, free=int(3.4 * GIB))
    refused = refusal(card=card)
    assert (refused.field, refused.message[-11:]) == ("gpu_memory_utilization", ": give 0.55")
    assert plan(card=card, share=0.55).num_blocks >= 1


def test_a_gpu_that_is_too_small_is_said_to_be_with_all_parts() -> None:
    refused = refusal(card=Card("cuda:1", total=12 * GIB, free=GIB), share=0.9)
    assert refused.field == "model"
    assert "10.0 GiB of weights, 2.0 GiB of passes and 1.0 GiB of recordings" in refused.message
    assert "in the 11.0 GiB of cuda:1: ask for less: fewer --max-batch-tokens" in refused.message


def test_as_many_blocks_are_made_as_asked_if_they_fit() -> None:
    most = (62 - 3) * 1024
    assert plan(num_blocks=most, most_blocks=1).num_blocks == most
    refused = refusal(num_blocks=most + 1)
    assert refused.field == "num_blocks"
    assert refused.message.endswith(f"has 59.0 GiB free: at most {most} fit")


LLAMA_8B = Needs(weights=8_030_261_248 * 2, passes=0, graphs=0, block=16 * 131_072)
LLAMA_1B = Needs(weights=1_235_814_400 * 2, passes=0, graphs=0, block=16 * 32_768)
OF_24 = {"name": "cuda:0", "total": 24 * GIB}


def both_on_24_gib(passes: int, graphs: int, shares: tuple[float, float]) -> list[MemoryPlan]:
    """A target of 8 billion parameters in 16 bits and a draft of one, loaded side by side."""
    free = 24 * GIB - LLAMA_8B.weights - LLAMA_1B.weights
    return [
        plan(
            Needs(model.weights, passes, graphs, model.block),
            Card(**OF_24, free=free),  # type: ignore[arg-type]
            share=share,
        )
        for model, share in zip((LLAMA_8B, LLAMA_1B), shares, strict=True)
    ]


def test_8b_and_1b_share_24_gib() -> None:
    target, draft = both_on_24_gib(600 * MIB, 300 * MIB, (0.75, 0.17))
    assert (target.num_blocks, draft.num_blocks) == (1107, 1841)
    assert target.planned <= 18 * GIB
    assert target.planned + draft.planned <= 0.92 * 24 * GIB


def test_8b_and_1b_with_large_passes_are_told_what_fits_in_24_gib() -> None:
    """Passes as they are where keys are gathered and noise is made by tensor operations."""
    with pytest.raises(InvalidArgumentError) as refused:
        both_on_24_gib(2600 * MIB, 1300 * MIB, (0.75, 0.17))
    assert refused.value.field == "gpu_memory_utilization"
    assert "without room for a cache beside 15.0 GiB of weights, 2.5 GiB of passes" in refused.value.message
    assert "ask for at least 0.79, or for less: fewer --max-batch-tokens" in refused.value.message
