"""Every sampling parameter through all processes, with speculation and without, against transformers.

The oracle is one forward of the plain model over prompt and output. At each position transformers' own
logits processors make of its row what the request asks for; the token must be the argmax of that, plus the
seed's noise where the request samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness.oracle import NEAR_TIE, Ids, Oracle
from harness.prompts import SOURCE
from harness.waiting import HANG
from transformers.generation import logits_process as hf

from paceline.client import Client, GenerationResult
from paceline.decoding.noise import gumbel

NEW_TOKENS = 32
KS = (0, 3)
SEED = 11
Processors = list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """A model, a prompt, and what greedy decoding makes of it when left alone."""

    oracle: Oracle
    prompt: Ids
    free: Ids

    @property
    def eos(self) -> int:
        (eos,) = self.oracle.eos_token_ids
        return eos

    def words(self) -> list[str]:
        """Words of the free output, of one token and of several."""
        found = dict.fromkeys(self.oracle.decode(self.free).split())
        return list(found)[:4]

    def word_ids(self) -> list[list[int]]:
        """Those words as tokens, at the beginning of a text and after a space."""
        texts = [text for word in self.words() for text in (word, f" {word}")]
        ids = [list(self.oracle.tokenizer(text, add_special_tokens=False).input_ids) for text in texts]
        return [list(each) for each in dict.fromkeys(map(tuple, ids))]


@pytest.fixture(scope="module")
def setting(oracle: Oracle) -> Setting:
    prompt = oracle.encode(SOURCE)[:60]
    return Setting(oracle, prompt, oracle.greedy(prompt, NEW_TOKENS, ignore_eos=True))


class Additive:
    """Presence and frequency penalties, which transformers lacks, as OpenAI's documentation words them."""

    def __init__(self, prompt: Ids, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(self.prompt) :], minlength=scores.shape[1])
        return scores - self.frequency * counts - self.presence * (counts > 0)


def only(tokens: Sequence[int]) -> hf.PrefixConstrainedLogitsProcessor:
    return hf.PrefixConstrainedLogitsProcessor(lambda _batch, _ids: list(tokens), num_beams=1)


def frequent(setting: Setting) -> list[int]:
    """Enough tokens to choose among, end-of-sequence not one of them."""
    return sorted({*setting.prompt, *setting.free[::2]} - {setting.eos})


CASES: Mapping[str, tuple[Callable[[Setting], dict[str, Any]], Callable[[Setting], Processors]]] = {
    "temperature": (lambda s: {"temperature": 0.7}, lambda s: [hf.TemperatureLogitsWarper(0.7)]),
    "top_k": (lambda s: {"top_k": 7}, lambda s: [hf.TopKLogitsWarper(7)]),
    "top_p": (lambda s: {"top_p": 0.8}, lambda s: [hf.TopPLogitsWarper(0.8)]),
    "min_p": (lambda s: {"min_p": 0.1}, lambda s: [hf.MinPLogitsWarper(0.1)]),
    "repetition_penalty": (
        lambda s: {"repetition_penalty": 1.4},
        lambda s: [hf.RepetitionPenaltyLogitsProcessor(1.4)],
    ),
    "presence_penalty": (lambda s: {"presence_penalty": 1.5}, lambda s: [Additive(s.prompt, 1.5, 0.0)]),
    "frequency_penalty": (lambda s: {"frequency_penalty": 0.9}, lambda s: [Additive(s.prompt, 0.0, 0.9)]),
    "logit_bias": (
        lambda s: {"logit_bias": {s.free[0]: -6.0, s.free[3]: 3.5}},
        lambda s: [hf.SequenceBiasLogitsProcessor([[[s.free[0]], -6.0], [[s.free[3]], 3.5]])],
    ),
    "min_tokens": (
        lambda s: {"min_tokens": 20, "logit_bias": {s.eos: 12.0}},
        lambda s: [
            hf.SequenceBiasLogitsProcessor([[[s.eos], 12.0]]),
            hf.MinNewTokensLengthLogitsProcessor(len(s.prompt), 20, [s.eos]),
        ],
    ),
    "bad_words": (
        lambda s: {"bad_words": s.words()},
        lambda s: [hf.NoBadWordsLogitsProcessor(s.word_ids(), eos_token_id=s.eos)],
    ),
    "allowed_token_ids": (lambda s: {"allowed_token_ids": frequent(s)}, lambda s: [only(frequent(s))]),
    "everything": (
        lambda s: {
            "repetition_penalty": 1.1,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.2,
            "logit_bias": {s.free[3]: 2.0},
            "min_tokens": 8,
            "bad_words": s.words(),
            "allowed_token_ids": [*frequent(s), s.eos],
            "temperature": 0.9,
            "min_p": 0.02,
            "top_k": 12,
            "top_p": 0.95,
        },
        lambda s: [
            hf.RepetitionPenaltyLogitsProcessor(1.1),
            Additive(s.prompt, 0.3, 0.2),
            hf.SequenceBiasLogitsProcessor([[[s.free[3]], 2.0]]),
            hf.MinNewTokensLengthLogitsProcessor(len(s.prompt), 8, [s.eos]),
            hf.NoBadWordsLogitsProcessor(s.word_ids(), eos_token_id=s.eos),
            only([*frequent(s), s.eos]),
            hf.TemperatureLogitsWarper(0.9),
            hf.MinPLogitsWarper(0.02),
            hf.TopKLogitsWarper(12),
            hf.TopPLogitsWarper(0.95),
        ],
    ),
}


def generate(client: Client, prompt: Ids, sampling: dict[str, Any], k: int) -> GenerationResult:
    parameters = {"max_tokens": NEW_TOKENS, "seed": SEED, **sampling}
    return client.generate(prompt, parameters, speculation={"num_speculative_tokens": k}, timeout=HANG)


def disagreements(
    setting: Setting, result: GenerationResult, processors: Processors, *, greedy: bool
) -> list[int]:
    """Positions whose token is not what plain decoding takes there, near-ties apart."""
    prompt, tokens = setting.prompt, result.token_ids
    rows = setting.oracle.logits(prompt, tokens[:-1])
    wrong = []
    for i, token in enumerate(tokens):
        seen = torch.tensor([[*prompt, *tokens[:i]]])
        scores = rows[i : i + 1]
        for process in processors:
            scores = process(seen, scores)
        values = scores.double().log_softmax(-1)
        if not greedy:
            values = values + gumbel([SEED], [len(prompt) + i], values.shape[1])
        if float(values.max() - values[0, token]) >= NEAR_TIE:
            wrong.append(i)
    return wrong


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES)
def test_plain_decoding_equals_transformers_processors(
    setting: Setting, client: Client, name: str, sampled: bool
) -> None:
    make, processors = CASES[name]
    sampling = make(setting) | ({} if sampled else {"temperature": 0})
    plain, speculative = (generate(client, setting.prompt, sampling, k) for k in KS)
    assert plain.token_ids == speculative.token_ids
    assert speculative.speculative_decoding.num_draft_tokens > 0
    assert len(plain.token_ids) == NEW_TOKENS or plain.finish_reason == "stop"
    assert disagreements(setting, plain, processors(setting), greedy=not sampled) == []


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("temperature", "top_p")])
def test_each_parameter_changes_the_output(setting: Setting, client: Client, name: str) -> None:
    """Otherwise the test above would pass for an ignored parameter."""
    make, _ = CASES[name]
    with_it = generate(client, setting.prompt, make(setting), 3)
    without = generate(client, setting.prompt, {}, 3)
    assert with_it.token_ids != without.token_ids
    assert disagreements(setting, with_it, [], greedy=False) != []


def test_bad_words_are_not_in_the_text(setting: Setting, client: Client) -> None:
    words = setting.words()
    assert all(word in setting.oracle.decode(setting.free) for word in words)
    banned = setting.word_ids()
    assert any(len(ids) == 1 for ids in banned)
    assert any(len(ids) > 1 for ids in banned)
    tokens = generate(client, setting.prompt, {"temperature": 0, "bad_words": words}, 3).token_ids
    whole = (*setting.prompt, *tokens)
    ends = range(len(setting.prompt) + 1, len(whole) + 1)
    assert not [ids for ids in banned for end in ends if list(whole[max(0, end - len(ids)) : end]) == ids]


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_masks_hold_in_every_mode(setting: Setting, client: Client, mode: str) -> None:
    """Those modes draw other tokens with another K, but never a forbidden one."""
    allowed = frequent(setting)
    sampling = {"max_tokens": 60, "seed": 3, "allowed_token_ids": allowed, "bad_words": setting.words()}
    speculation = {"num_speculative_tokens": 3, "acceptance": mode}
    result = client.generate(setting.prompt, sampling, speculation=speculation, timeout=HANG)
    assert result.speculative_decoding.num_accepted_draft_tokens > 0
    assert set(result.token_ids) <= set(allowed)
    singles = {ids[0] for ids in setting.word_ids() if len(ids) == 1}
    assert not singles & set(result.token_ids)
