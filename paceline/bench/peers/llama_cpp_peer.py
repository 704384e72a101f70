"""llama.cpp by llama-cpp-python, on the target's checkpoint written as GGUF."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from paceline.bench.peers.gguf_file import write_gguf
from paceline.bench.peers.interface import Peer, PeerAbsentError, PeerArm, PeerSetup

_CONTEXT = 2048


def load(setup: PeerSetup) -> list[PeerArm]:
    """Write and load. Raises ImportError without the packages, PeerAbsentError for other models."""
    import llama_cpp

    if setup.target_dtype != "float32":
        raise PeerAbsentError(f"takes part in float32 only, the target runs in {setup.target_dtype}")
    file = setup.folder / "target.gguf"
    write_gguf(setup.target, file)
    model: Any = llama_cpp.Llama(
        model_path=str(file),
        n_ctx=_CONTEXT,
        n_threads=setup.threads,
        n_threads_batch=setup.threads,
        n_gpu_layers=0 if setup.device == "cpu" else -1,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )

    def generate(prompt: Sequence[int], temperature: float, seed: int, max_tokens: int) -> int:
        model.set_seed(seed % 2**31)
        model.reset()
        tokens = model.generate(
            list(prompt), temp=temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0
        )
        return sum(1 for _ in islice(tokens, max_tokens))

    return [PeerArm("llama.cpp", generate)]


PEER = Peer("llama.cpp", "llama-cpp-python", load)
