"""transformers as the oracle: greedy generation, exact distributions, and proof of a near-tie."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

NEAR_TIE = 1e-4
"""A gap between the two largest logits below this may be decided either way: batches of other shapes differ
in the last bits of float32."""

Ids = tuple[int, ...]


class ParityError(AssertionError):
    """The service's tokens are not the oracle's, and no near-tie explains it."""


@dataclass(frozen=True)
class Oracle:
    """The plain Hugging Face model in float32, default attention, one prompt at a time."""

    model: Any
    tokenizer: Any

    @classmethod
    @functools.cache
    def load(cls, folder: Path, device: str = "cpu") -> Oracle:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        disable_progress_bar()
        set_verbosity_error()
        if device == "cpu":
            torch.set_num_threads(1)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        return cls(model, AutoTokenizer.from_pretrained(folder))

    def __hash__(self) -> int:
        return id(self)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What generate stops at."""
        eos = self.model.generation_config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    @property
    def vocabulary_size(self) -> int:
        """Width of the logits."""
        return int(self.model.config.vocab_size)

    def encode(self, text: str) -> Ids:
        """Ids of a prompt."""
        return tuple(self.tokenizer(text).input_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @functools.lru_cache(maxsize=512)  # noqa: B019 - oracles live as long as the session
    def greedy(
        self,
        prompt: Ids,
        max_new_tokens: int,
        *,
        bias: tuple[tuple[int, float], ...] = (),
        ignore_eos: bool = False,
        **more: float,
    ) -> Ids:
        """`model.generate(do_sample=False)`; computed once a prompt."""
        ids = torch.tensor([prompt], device=self.model.device)
        options: dict[str, Any] = dict(more)
        if bias:
            options["sequence_bias"] = [[[token], value] for token, value in bias]
        if ignore_eos:
            options["eos_token_id"] = -1
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=0,
            **options,
        )
        return tuple(out[0, len(prompt) :].tolist())

    @torch.inference_mode()
    def logits(self, prompt: Ids, continuation: Sequence[int] = ()) -> torch.Tensor:
        """float32 [len(continuation) + 1, V]: after the prompt and after each token of the continuation."""
        ids = torch.tensor([[*prompt, *continuation]], device=self.model.device)
        return self.model(ids).logits[0, len(prompt) - 1 :].float().cpu()

    def check_greedy(
        self,
        prompt: Ids,
        got: Sequence[int],
        max_new_tokens: int,
        *,
        bias: tuple[tuple[int, float], ...] = (),
        ignore_eos: bool = False,
        **more: float,
    ) -> int:
        """Raise ParityError unless `got` is what generate gives. Returns how many proven near-ties differ.

        Where the two part, the oracle's own logits must be a near-tie between exactly these two tokens;
        from there on `got` is held against generate once more, now after the tokens that were chosen.
        """
        options = {"bias": bias, "ignore_eos": ignore_eos, **more}
        got, ties, done = tuple(got), 0, 0
        while True:
            want = self.greedy(prompt + got[:done], max_new_tokens - done, **options)
            part = first_difference(got[done:], want)
            if part is None:
                return ties
            at = done + part
            if part >= len(want) or at >= len(got):
                raise ParityError(f"{len(got)} tokens where {done + len(want)} were due: {got} / {want}")
            if more:
                raise ParityError(f"token {at} is {got[at]}, generate takes {want[part]}")
            self._prove_near_tie(prompt + got[:at], got[at], want[part], dict(bias), at)
            ties, done = ties + 1, at + 1
            if done == max_new_tokens or (got[at] in self.eos_token_ids and not ignore_eos):
                if done != len(got):
                    raise ParityError(f"goes on after its end at {at}")
                return ties

    def _prove_near_tie(
        self, context: Ids, chosen: int, wanted: int, bias: Mapping[int, float], at: int
    ) -> None:
        row = self.logits(context)[-1].clone()
        for token, value in bias.items():
            row[token] += value
        top = row.topk(2)
        gap = float(top.values[0] - top.values[1])
        if gap >= NEAR_TIE or {chosen, wanted} != set(top.indices.tolist()):
            raise ParityError(
                f"token {at} is {chosen}, generate takes {wanted}; the two largest logits are"
                f" {gap:.2e} apart, so this is no near-tie"
            )

    @torch.inference_mode()
    def distribution(
        self, prompts: Sequence[Ids], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> torch.Tensor:
        """float64 [N, V]: the exact distribution of the next token, by transformers' own warpers.

        All prompts have one length.
        """
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        ids = torch.tensor(prompts, device=self.model.device)
        scores = self.model(ids).logits[:, -1].float().cpu()
        if temperature != 1:
            scores = TemperatureLogitsWarper(temperature)(ids.cpu(), scores)
        if top_k:
            scores = TopKLogitsWarper(top_k)(ids.cpu(), scores)
        if top_p < 1:
            scores = TopPLogitsWarper(top_p)(ids.cpu(), scores)
        return scores.double().softmax(-1)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first place where two sequences differ, a missing token included; None if equal."""
    if tuple(one) == tuple(other):
        return None
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
