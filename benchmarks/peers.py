"""transformers on the same checkpoints: plain `generate` and its assisted generation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

Arm = Callable[[Sequence[int], float, int], float]
"""(prompt ids, temperature, seed) -> tokens per second."""


class Transformers:
    """Both models, loaded once, in float32 as the workers compute."""

    def __init__(self, target: str, draft: str, threads: int, max_tokens: int, k: int) -> None:
        torch.set_num_threads(threads)
        logging.set_verbosity_error()
        load: Any = AutoModelForCausalLM.from_pretrained
        self._target = load(target, dtype=torch.float32).eval()
        self._draft = load(draft, dtype=torch.float32).eval()
        # The same K in every round, as the service has it; the default schedule changes it.
        self._draft.generation_config.num_assistant_tokens = k
        self._draft.generation_config.num_assistant_tokens_schedule = "constant"
        self._draft.generation_config.assistant_confidence_threshold = 0.0
        self._max_tokens = max_tokens

    def plain(self, prompt: Sequence[int], temperature: float, seed: int) -> float:
        """`generate` on the target alone."""
        return self._run(prompt, temperature, seed)

    def assisted(self, prompt: Sequence[int], temperature: float, seed: int) -> float:
        """`generate` with the draft as assistant model."""
        return self._run(prompt, temperature, seed, assistant_model=self._draft)

    def _run(self, prompt: Sequence[int], temperature: float, seed: int, **more: Any) -> float:
        torch.manual_seed(seed)
        ids = torch.tensor([list(prompt)])
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        begun = time.perf_counter()
        out = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._max_tokens,
            min_new_tokens=self._max_tokens,
            pad_token_id=0,
            **sampling,
            **more,
        )
        return float(out.shape[1] - ids.shape[1]) / (time.perf_counter() - begun)
