"""Settings that cannot be measured are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import InvalidArgumentError
from paceline.measure.config import MeasureConfig


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", {"temperature": ()}),
        ("temperature", {"temperature": (1.0, 1.0)}),
        ("temperature", {"temperature": (-1.0,)}),
        ("top_p", {"top_p": 0.0}),
        ("top_k", {"top_k": -2}),
        ("seed", {"seed": -1}),
        ("target_model", {"target_model": ""}),
        ("draft_model", {"draft_models": ("",)}),
        ("draft_model", {"draft_models": ("a", "a")}),
        ("draft_model", {"draft_models": ()}),
        ("drafter", {"drafters": ("ngram", "ngram")}),
        ("drafter", {"draft_models": ("ngram",), "drafters": ("ngram",)}),
        ("max_tokens", {"max_tokens": 1}),
        ("max_k", {"max_k": 0}),
        ("max_k", {"max_k": 33}),
        ("threads", {"threads": 0}),
        ("device", {"device": "tpu"}),
        ("dtype", {"dtype": "int4"}),
    ],
)
def test_an_invalid_setting_is_refused(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        MeasureConfig(**values)
    assert refused.value.field == field


def test_each_text_has_its_own_seed() -> None:
    config = MeasureConfig(seed=5, temperature=(0.0, 0.7), top_k=40)
    sampling = config.sampling(0.7, 3)
    assert (sampling.seed, sampling.temperature, sampling.top_k) == (8, 0.7, 40)
