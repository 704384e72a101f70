"""Parameter classes validate on construction."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core import limits
from paceline.core.types import (
    AcceptanceMode,
    Proposal,
    SamplingParams,
    SparseDistribution,
    SpeculationParams,
    StructuredOutputs,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", bad) for bad in (math.nan, math.inf, -1, 1e-5, 100.1, "1", None, True)),
        *(("top_p", bad) for bad in (math.nan, 0, -0.5, 1.5, "1", False)),
        *(("top_k", bad) for bad in (-2, 1.5, "4", True)),
        *(("min_p", bad) for bad in (math.nan, -0.1, 1.1)),
        *(("repetition_penalty", bad) for bad in (math.nan, math.inf, 0, 1e-38, 0.0099, -1, 101)),
        *(("presence_penalty", bad) for bad in (math.nan, -2.5, 2.5)),
        *(("frequency_penalty", bad) for bad in (math.nan, -2.5, 2.5)),
        *((name, 10**400) for name in ("temperature", "top_p", "min_p", "repetition_penalty")),
        *(("ignore_eos", bad) for bad in ("yes", 1, None)),
        ("include_stop_str_in_output", "no"),
        ("logit_bias", [(1, 1.0)]),
        ("logit_bias", None),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", dict.fromkeys(range(limits.MAX_LOGIT_BIAS_ENTRIES + 1), 1.0)),
        *(("seed", bad) for bad in (-1, 2**64, 1.0, "1", True)),
        *(("max_tokens", bad) for bad in (0, -1, limits.MAX_TOKENS + 1, 1.0, True)),
        *(("min_tokens", bad) for bad in (-1, 17, 1.0, limits.MAX_TOKENS + 1)),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop", 5),
        ("stop", None),
        ("stop_token_ids", 5),
        ("stop_token_ids", "12"),
        ("stop", ("x",) * (limits.MAX_STOP_STRINGS + 1)),
        ("stop", ("x" * (limits.MAX_STOP_STRING_CHARACTERS + 1),)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", tuple(range(limits.MAX_STOP_TOKEN_IDS + 1))),
        *(("bad_words", bad) for bad in (("",), (5,), 5, None, ("x",) * (limits.MAX_BAD_WORDS + 1))),
        ("bad_words", ("x" * (limits.MAX_BAD_WORD_CHARACTERS + 1),)),
        *(("allowed_token_ids", bad) for bad in ((), 5, "12", (-1,), (1.0,), (True,))),
        ("allowed_token_ids", range(limits.MAX_ALLOWED_TOKEN_IDS + 1)),
        *(("n", bad) for bad in (0, -1, limits.MAX_N + 1, 1.0, True, None)),
        *(
            (name, bad)
            for name in ("logprobs", "prompt_logprobs")
            for bad in (-1, limits.MAX_LOGPROBS + 1, 1.0, True, "all")
        ),
        *(("echo", bad) for bad in (1, "yes", None)),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_sampling_params_are_refused_by_field(name: str, value: Any) -> None:
    with refused(name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 0),
        ("temperature", limits.MIN_TEMPERATURE),
        ("temperature", limits.MAX_TEMPERATURE),
        ("top_p", 1e-300),
        ("repetition_penalty", limits.MIN_REPETITION_PENALTY),
        ("repetition_penalty", limits.MAX_REPETITION_PENALTY),
        ("min_p", 1),
        ("seed", limits.MAX_SEED),
        ("max_tokens", 1),
        ("max_tokens", limits.MAX_TOKENS),
        ("min_tokens", 16),
        ("logit_bias", {0: -100, 1: 100}),
        ("n", limits.MAX_N),
        ("logprobs", 0),
        ("prompt_logprobs", limits.MAX_LOGPROBS),
        ("allowed_token_ids", (0,)),
        ("bad_words", ("x" * limits.MAX_BAD_WORD_CHARACTERS,) * limits.MAX_BAD_WORDS),
    ],
)
def test_the_bounds_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_convenient_spellings_are_normalised() -> None:
    params = SamplingParams(stop="END", top_k=-1)
    assert params.stop == ("END",)
    assert params.top_k == 0
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words="word").bad_words == ("word",)
    assert SamplingParams(allowed_token_ids=[3, 1]).allowed_token_ids == (3, 1)


def test_choices_are_separate_requests() -> None:
    params = SamplingParams(seed=7, n=4, temperature=0.5, logprobs=2, prompt_logprobs=3)
    choices = [params.of_choice(i) for i in range(4)]
    assert choices[0] == dataclasses.replace(params, n=1)
    assert {choice.n for choice in choices} == {1}
    assert [choice.prompt_logprobs for choice in choices] == [3, None, None, None]
    assert {choice.logprobs for choice in choices} == {2}
    seeds = [choice.seed for choice in choices]
    assert seeds[0] == 7
    assert seeds == [params.of_choice(i).seed for i in range(4)]
    alone = dataclasses.replace(params, n=1)
    assert alone.of_choice(0) is alone


def test_derived_parameters_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(seed=7, n=4, allowed_token_ids=range(100), prompt_logprobs=3)
    checked: list[SamplingParams] = []

    def note(made: SamplingParams) -> None:
        checked.append(made)

    monkeypatch.setattr(SamplingParams, "__post_init__", note)
    copies = [params.of_choice(i) for i in range(4)]
    other, silent = params.with_seed(8), params.without_prompt_report()
    assert not checked
    monkeypatch.undo()
    assert {copy.allowed_token_ids for copy in copies} == {tuple(range(100))}
    assert other == dataclasses.replace(params, seed=8)
    assert silent == dataclasses.replace(params, prompt_logprobs=None)
    assert params.seed == 7


def test_neighbouring_seeds_share_no_choice() -> None:
    seeds = [SamplingParams(seed=s, n=8).of_choice(i).seed for s in range(50) for i in range(8)]
    assert len(set(seeds)) == 50 * 8
    assert all(0 <= seed <= limits.MAX_SEED for seed in seeds if seed is not None)


def test_min_tokens_may_exceed_the_default_without_maximum() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=1000).min_tokens == 1000


def test_greedy_and_penalties_are_derived() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams().greedy
    assert not SamplingParams().has_penalties
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", 0.1), ("frequency_penalty", -0.1)):
        assert SamplingParams(**{name: value}).has_penalties  # type: ignore[arg-type]


def test_an_unknown_parameter_is_refused_by_name() -> None:
    for cls in (SamplingParams, SpeculationParams):
        with refused("temprature", "unknown parameter; known are"):
            cls.from_mapping({"temprature": 1})  # type: ignore[attr-defined]


def test_params_are_made_from_a_mapping() -> None:
    assert SamplingParams.from_mapping({"top_p": 0.5, "stop": "x"}) == SamplingParams(top_p=0.5, stop=("x",))
    assert SpeculationParams.from_mapping({"acceptance": "block"}).mode is AcceptanceMode.BLOCK


@pytest.mark.parametrize("k", [None, 0, limits.MAX_SPECULATIVE_TOKENS, "auto"])
def test_k_is_a_number_or_automatic(k: Any) -> None:
    assert SpeculationParams(num_speculative_tokens=k).num_speculative_tokens == k


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tree_width", (None, 1, limits.MAX_TREE_WIDTH, "auto")),
        ("max_tree_nodes", (None, 1, limits.MAX_TREE_NODES)),
        ("drafts_per_sequence", (None, 1, limits.MAX_DRAFTS)),
    ],
)
def test_trees_are_bounded(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert getattr(SpeculationParams(**{name: value}), name) == value


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0  # type: ignore[misc]


@pytest.mark.parametrize("mode", AcceptanceMode)
def test_an_acceptance_mode_may_be_given_by_name(mode: AcceptanceMode) -> None:
    assert SpeculationParams(acceptance=mode.value) == SpeculationParams(acceptance=mode)
    assert SpeculationParams(acceptance=mode.value).mode is mode
    assert SpeculationParams().mode is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("num_speculative_tokens", bad)
            for bad in (-1, limits.MAX_SPECULATIVE_TOKENS + 1, 1.0, True, "4", "AUTO", "")
        ),
        *(("tree_width", bad) for bad in (0, limits.MAX_TREE_WIDTH + 1, 2.0, True, "2", "AUTO", "")),
        *(("max_tree_nodes", bad) for bad in (0, limits.MAX_TREE_NODES + 1, 8.0, True, "auto")),
        *(("drafts_per_sequence", bad) for bad in (0, limits.MAX_DRAFTS + 1, 2.0, True, "auto")),
        ("acceptance", "lossy"),
        ("acceptance", ""),
        ("acceptance", 5),
    ],
)
def test_invalid_speculation_params_are_refused_by_field(name: str, value: Any) -> None:
    with refused(name):
        SpeculationParams(**{name: value})


def test_proposals_and_distributions_have_sizes() -> None:
    assert Proposal((1, 2, 3)).num_draft_tokens == 3
    assert len(SparseDistribution(b"12345678", b"12345678")) == 2


def test_a_schema_is_measured_by_its_characters() -> None:
    """A character beyond ASCII counts once, not as its escape."""
    text = "ж" * (limits.MAX_STRUCTURE_CHARACTERS - len('{"const": ""}'))
    assert StructuredOutputs(json={"const": text}).json == f'{{"const": "{text}"}}'
    with refused("structured_outputs.json"):
        StructuredOutputs(json={"const": text + "ж"})
