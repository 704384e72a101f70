"""transformers: `generate`, its assisted generation, and its prompt lookup."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from typing import Any

from paceline.bench.peers.interface import Peer, PeerArm, PeerSetup

PROMPT_LOOKUP_TOKENS = 10  # transformers' documentation uses as many


def import_ahead() -> None:
    """Import what loading needs, which takes seconds; loading says why it cannot be imported."""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.modeling_utils")
        importlib.import_module("transformers.generation.utils")


class Transformers:
    """Both models, loaded once."""

    def __init__(self, setup: PeerSetup) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        from paceline.engine.checkpoint import check_weights

        torch.set_num_threads(setup.threads)
        # transformers annotates these in ways that no caller can satisfy.
        logging: Any = transformers_logging
        load: Any = AutoModelForCausalLM.from_pretrained
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        for model in (setup.target, setup.draft):
            check_weights(model, AutoConfig.from_pretrained(model))
        self._torch: Any = torch
        self._device = setup.device
        self._target, self._draft, self._draft_same_k = (
            load(model, dtype=getattr(torch, dtype), use_safetensors=True).eval().to(setup.device)
            for model, dtype in (
                (setup.target, setup.target_dtype),
                (setup.draft, setup.draft_dtype),
                (setup.draft, setup.draft_dtype),
            )
        )
        # A draft model carries its schedule with it: one has the library's own, one our K in every round.
        same = self._draft_same_k.generation_config
        same.num_assistant_tokens = setup.k
        same.num_assistant_tokens_schedule = "constant"
        same.assistant_confidence_threshold = 0.0
        self._k = setup.k

    def arms(self) -> list[PeerArm]:
        """All ways it decodes."""
        return [
            self._arm("generate"),
            self._arm(f"assisted generation, K={self._k}", assistant_model=self._draft_same_k),
            self._arm("assisted generation, own schedule", assistant_model=self._draft),
            self._arm("prompt lookup", prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        ]

    def _arm(self, name: str, **how: Any) -> PeerArm:
        def generate(prompt: Sequence[int], temperature: float, seed: int, max_tokens: int) -> int:
            self._torch.manual_seed(seed)
            ids = self._torch.tensor([list(prompt)], device=self._device)
            sampling = (
                {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
                if temperature
                else {"do_sample": False}
            )
            out = self._target.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                **sampling,
                **how,
            )
            return int(out.shape[1] - ids.shape[1])

        return PeerArm(f"transformers {name}", generate)


PEER = Peer("transformers", "transformers", lambda setup: Transformers(setup).arms())
