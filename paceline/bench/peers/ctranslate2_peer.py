"""CTranslate2: its own engine, on the target's checkpoint converted to its format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.bench.peers.interface import Peer, PeerAbsentError, PeerArm, PeerSetup


def load(setup: PeerSetup) -> list[PeerArm]:
    """Convert and load. Raises ImportError without the package, PeerAbsentError for other models."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter
    from transformers import AutoTokenizer

    folder = setup.folder / "ctranslate2"
    try:
        TransformersConverter(setup.target).convert(str(folder), quantization=setup.target_dtype)
    except (ValueError, KeyError, AttributeError) as error:
        raise PeerAbsentError(f"cannot convert {setup.target}: {error}") from error
    device, _, index = setup.device.partition(":")
    generator: Any = ctranslate2.Generator(
        str(folder),
        device=device,
        device_index=int(index or 0),
        compute_type=setup.target_dtype,
        inter_threads=1,
        intra_threads=setup.threads,
    )
    tokenizer: Any = AutoTokenizer.from_pretrained(setup.target)

    def generate(prompt: Sequence[int], temperature: float, seed: int, max_tokens: int) -> int:
        ctranslate2.set_random_seed(seed % 2**31)
        (result,) = generator.generate_batch(
            [tokenizer.convert_ids_to_tokens(list(prompt))],
            max_length=max_tokens,
            min_length=max_tokens,
            sampling_topk=0 if temperature else 1,
            sampling_temperature=temperature or 1.0,
            include_prompt_in_result=False,
            end_token=[],
        )
        return len(result.sequences_ids[0])

    return [PeerArm("CTranslate2", generate)]


PEER = Peer("CTranslate2", "ctranslate2", load)
