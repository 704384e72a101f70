"""transformers on the same checkpoints: `generate`, and its assisted generation.

It runs in the measuring process while Paceline's processes sleep, on the same device, with as many threads as
one of our models has. It computes in the same number format (float32 on a CPU, unless another is asked for)
and has its weights in it too, where ours may be in 16 bits (decision 18).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.config import BenchConfig
from paceline.client import WorkerInfo

Generate = Callable[[Sequence[int], float, int, int], int]
"""(prompt ids, temperature, seed, max tokens) -> how many tokens it generated; EOS does not end it."""


def load(
    config: BenchConfig, checkpoints: tuple[str, str], target: WorkerInfo, draft: WorkerInfo
) -> dict[str, Generate]:
    """Load both models; all ways it decodes, by name.

    Args:
        config: threads, and the K of one of its ways to assist.
        checkpoints: directories or hub ids of target and draft.
        target: our worker, whose device and number format it has.
        draft: our worker, whose number format it has.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from paceline.engine.loading.checkpoint import check_weights

    torch.set_num_threads(config.threads)
    # transformers annotates these in ways that no caller can satisfy.
    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pretrained: Any = AutoModelForCausalLM.from_pretrained

    def model(checkpoint: str, dtype: str) -> Any:
        check_weights(checkpoint, AutoConfig.from_pretrained(checkpoint))
        loaded = pretrained(checkpoint, dtype=getattr(torch, dtype), use_safetensors=True)
        return loaded.eval().to(target.device)

    large = model(checkpoints[0], target.dtype)
    # A draft model carries its schedule with it: one has the library's own, one our K in every round.
    own_schedule, same_k = (model(checkpoints[1], draft.dtype) for _ in range(2))
    same_k.generation_config.num_assistant_tokens = config.k[0]
    same_k.generation_config.num_assistant_tokens_schedule = "constant"
    same_k.generation_config.assistant_confidence_threshold = 0.0

    def way(**how: Any) -> Generate:
        def generate(prompt: Sequence[int], temperature: float, seed: int, max_tokens: int) -> int:
            torch.manual_seed(seed)
            ids = torch.tensor([list(prompt)], device=target.device)
            drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            out = large.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                **(drawn if temperature else {"do_sample": False}),
                **how,
            )
            return int(out.shape[1] - ids.shape[1])

        return generate

    return {
        "transformers generate": way(),
        f"transformers assisted generation, K={config.k[0]}": way(assistant_model=same_k),
        "transformers assisted generation, own schedule": way(assistant_model=own_schedule),
    }
