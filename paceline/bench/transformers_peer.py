"""The peer: transformers' `generate` and assisted generation on the same checkpoints.

It runs in the measuring process while Paceline's processes are idle, on the same device, with the threads of
one model. It computes in the same number format (float32 on a CPU by default) and stores its weights in that
format, whereas Paceline may store them in 16 bits (decision 18).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.bench.config import BenchConfig
from paceline.client import WorkerInfo

Generate = Callable[[Sequence[int], float, int, int], int]
"""(prompt ids, temperature, seed, max tokens) -> number of generated tokens; EOS does not end generation."""


def load(
    config: BenchConfig, checkpoints: tuple[str, str], target: WorkerInfo, draft: WorkerInfo
) -> dict[str, Generate]:
    """Load both models and return the peer's arms by name.

    Args:
        config: threads, and K of one assisted arm.
        checkpoints: directories or hub ids of target and draft.
        target: Paceline's target worker, for its device and number format.
        draft: Paceline's draft worker, for its number format.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from paceline.engine.loading.checkpoint import check_weights

    torch.set_num_threads(config.threads)
    # Any, because transformers' annotations of these functions are wrong.
    logging: Any = transformers_logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pretrained: Any = AutoModelForCausalLM.from_pretrained

    def model(checkpoint: str, dtype: str) -> Any:
        check_weights(checkpoint, AutoConfig.from_pretrained(checkpoint))
        loaded = pretrained(checkpoint, dtype=getattr(torch, dtype), use_safetensors=True)
        return loaded.eval().to(target.device)

    large = model(checkpoints[0], target.dtype)
    # The schedule belongs to the draft model: one copy has the library's, the other a constant K.
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
