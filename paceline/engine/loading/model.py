"""Loads a model and its tokenizer for the runner."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as library_logging
from transformers.utils.hub import cached_file

from paceline.assets.causes import cause_of
from paceline.core.errors import InvalidArgumentError
from paceline.core.fingerprint import vocabulary_fingerprint
from paceline.engine.backends.attention import IMPLEMENTATION, inspect_attention
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.varlen import VARLEN
from paceline.engine.backends.captured import Recorder, room_for_logits
from paceline.engine.backends.interface import ServedModel
from paceline.engine.cache import DEFAULT_BLOCK_SIZE, PagedCache, bytes_per_block
from paceline.engine.loading.attention_choice import choose_attention
from paceline.engine.loading.backend_choice import choose_backend, recorded_backend
from paceline.engine.loading.checkpoint import check_weights, refuse_single_file
from paceline.engine.loading.measuring import PeakLoad
from paceline.engine.loading.scaled import scaled
from paceline.engine.loading.self_check import logits_of_transformers, tokens_to_compare
from paceline.engine.loading.sizing import cache_size
from paceline.engine.runner import ModelRunner, max_length_of, output_width
from paceline.telemetry.steps import step

log = logging.getLogger(__name__)

_LOAD = PeakLoad()
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve, with the facts that other processes need."""

    model: Any
    """None if only its vocabulary was loaded."""
    tokenizer: Any
    eos_token_ids: frozenset[int]
    """All below `vocab_size`; possibly none."""
    vocab_size: int
    """Token ids of the tokenizer: [0, vocab_size). The model's output may be wider (padding)."""
    max_model_len: int
    fingerprint: str
    """Fingerprint of the tokenizer's vocabulary; see paceline.core.fingerprint."""


def load_model(
    path_or_id: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    scale: int = 1,
) -> LoadedModel:
    """Load a decoder by path or Hugging Face id.

    `dtype` None keeps the checkpoint's own, except that a 16-bit checkpoint becomes float32 on a CPU: few
    CPUs have fast 16-bit arithmetic, and a verification pass then differs from plain decoding in the last
    bits of 8, not of 24. "bfloat16" halves the memory. Weights are read from safetensors only and are not
    converted: a quantised or incomplete checkpoint is refused. Raises InvalidArgumentError naming `model` or
    `dtype`, and the device's error if it is out of memory. A Llama model is grown to about `scale` times its
    parameters, with the same function (scaled.py).
    """
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgumentError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype}")
    name = str(path_or_id)
    device = torch.device(device)
    config = _load_config(name, trust_remote_code)
    _refuse_quantised(name, config)
    # A config may name a kernel of the hub, which is code. The model uses Paceline's attention in any case.
    config._attn_implementation = None
    check_weights(name, config)
    tokenizer = _load_tokenizer(name, trust_remote_code)  # before the weights, which take longer
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=_dtype_to_load(config, device) if dtype is None else DTYPES[dtype],
            trust_remote_code=trust_remote_code,
            # Weights in any other format are pickles.
            use_safetensors=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise _refusal(name, "cannot be loaded as a decoder", error) from error
    model, found = loaded
    _refuse_incomplete(name, found)
    if dtype is None and device.type == "cpu" and model.dtype.itemsize < 4:
        # The config did not give the dtype.
        model = model.float()
    model = prepare(scaled(model.to(device), scale))
    return _loaded(name, model, tokenizer, model.config, eos_token_ids(model), output_width(model))


def load_vocabulary(path_or_id: str | Path, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load everything except the weights of a decoder, by path or Hugging Face id: `model` is None.

    Raises InvalidArgumentError naming `model`.
    """
    name = str(path_or_id)
    config = _load_config(name, trust_remote_code)
    tokenizer = _load_tokenizer(name, trust_remote_code)
    generation = None
    with contextlib.suppress(OSError):  # a checkpoint may lack one
        generation = GenerationConfig.from_pretrained(name)
    width = int(config.get_text_config(decoder=True).vocab_size)
    return _loaded(name, None, tokenizer, config, _eos_of(generation, config), width)


def _load_config(name: str, trust_remote_code: bool) -> Any:
    refuse_single_file(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers and its configs raise many kinds
        raise _refusal(name, "has no configuration that can be loaded", error) from error
    _refuse_unsupported(config)
    return config


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _refusal(name, "has no tokenizer that can be loaded", error) from error


def _loaded(
    name: str, model: Any, tokenizer: Any, config: Any, ends: frozenset[int], width: int
) -> LoadedModel:
    """`ends`: its end-of-sequence tokens. `width`: logits of a row, padding included."""
    vocabulary = _vocabulary(name, tokenizer)
    vocab_size = min(max(vocabulary.values()) + 1, width)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        # A token outside the vocabulary ends no text.
        eos_token_ids=frozenset(i for i in ends if 0 <= i < vocab_size),
        vocab_size=vocab_size,
        max_model_len=max_length_of(config),
        fingerprint=vocabulary_fingerprint(vocabulary),
    )


def prepare(model: Any) -> Any:
    """Put `model` into evaluation mode and on Paceline's attention, or refuse it."""
    _refuse_unsupported(model.config)
    if getattr(model, "_is_stateful", False):
        # Such state is not in the cache, and its previous rows may belong to another sequence.
        raise InvalidArgumentError(
            "model", f"{type(model).__name__} keeps state other than keys and values, which cannot be served"
        )
    model.eval().requires_grad_(False)
    model.set_attn_implementation(IMPLEMENTATION)
    if model.config._attn_implementation != IMPLEMENTATION:
        raise InvalidArgumentError(
            "model", f"{type(model).__name__} does not support transformers' attention interface"
        )
    return model


def make_runner(
    loaded: LoadedModel | Any,
    *,
    block_size: int | None = None,
    num_blocks: int | None = None,
    memory_share: float | None = None,
    load: PeakLoad = _LOAD,
    max_model_len: int | None = None,
    backends: Iterable[str] = ("torch",),
    deterministic: bool = False,
    attention_backend: str = GATHERED.name,
    new_recorder: Callable[[], Recorder] | None = None,
) -> ModelRunner:
    """A runner with a cache of `num_blocks`, or sized by memory.

    Without `num_blocks`, the cache takes what `load` leaves of the `memory_share` of a GPU, or free memory.
    `block_size` None is 16, or what `choose_attention` needs for `attention_backend`; the model's length
    makes the cache "slotted", one block a sequence. A cache sized by memory never has more blocks than all
    sequences the server admits could fill.

    Before the runner is returned, it is compared with transformers on a few tokens. A model with other logits
    here (one that ignores `position_ids`, for example) is refused with an InvalidArgumentError naming
    `model`. `backends` names the permitted backends of the registry. The last one in the registry's order
    that serves this model with the right logits is used. It may take over the weights: the model then runs
    through the runner only. If the model's positions cannot be kept for `max_model_len`, the error names that
    field. `deterministic` refuses backends that cannot give a row the same bits in any pass, naming that
    field. `new_recorder` makes recorders of passes, which are used if recorded logits are right: one recorder
    for the trial, another one to serve.
    """
    model = loaded.model if isinstance(loaded, LoadedModel) else loaded
    layers = inspect_attention(model)
    attention = choose_attention(attention_backend, layers, model.dtype, model.device, block_size)
    size = block_size or max(DEFAULT_BLOCK_SIZE, attention.smallest_block)
    longest = max_model_len or max_length_of(model.config)
    _refuse_changing_positions(model.config, longest)
    vocab_size = loaded.vocab_size if isinstance(loaded, LoadedModel) else None
    step("comparing the model with transformers on a few tokens")
    expected = logits_of_transformers(model)
    # The comparison may be longer than the served sequences.
    positions = max(longest, len(tokens_to_compare(model)))
    width = vocab_size or output_width(model)
    served = ServedModel(model, layers, positions, width, deterministic, attention)
    backend = choose_backend(served, backends, expected, may_gather=attention_backend != VARLEN)
    room = None
    if new_recorder is not None:
        room = room_for_logits(output_width(model), model.dtype, model.device)
    # Only now, when the backend has joined or packed the weights.
    size_of_cache = cache_size(
        served,
        backend,
        load,
        block_size=size,
        num_blocks=num_blocks,
        share=memory_share,
        recorded=room is not None,
        longest=longest,
    )
    num_blocks, block_bytes = size_of_cache.num_blocks, bytes_per_block(layers, size, model.dtype)
    step("making a cache of %d blocks, %.1f GiB", num_blocks, num_blocks * block_bytes / (1 << 30))
    cache = PagedCache(layers, num_blocks=num_blocks, block_size=size, dtype=model.dtype, device=model.device)
    if new_recorder is not None and room is not None:
        backend = recorded_backend(served, backend, cache, expected, new_recorder, room, longest)
    if deterministic and not backend.skills.row_invariant:
        raise InvalidArgumentError(
            "deterministic",
            f"is not supported for {type(model).__name__} in {str(model.dtype).removeprefix('torch.')} on "
            f"{model.device.type}; it requires a float32 model of the Llama family on a CPU",
        )
    return ModelRunner(
        model,
        cache,
        backend,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        memory_plan=size_of_cache.plan,
    )


def random_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of `config`'s shape with random weights, on its own copy of the config; for tests."""
    config = copy.deepcopy(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype)
    return prepare(model)


def eos_token_ids(model: Any) -> frozenset[int]:
    """Tokens that end a sequence: the generation config's, else the config's; possibly none."""
    return _eos_of(getattr(model, "generation_config", None), model.config)


def _eos_of(generation: Any, config: Any) -> frozenset[int]:
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _refuse_unsupported(config: Any) -> None:
    if config.is_encoder_decoder:
        raise InvalidArgumentError("model", f"{config.model_type} is an encoder-decoder, not a decoder")


def _dtype_to_load(config: Any, device: torch.device) -> torch.dtype | str:
    """The dtype to load in. A model created in 16 bits and widened later keeps 16-bit buffers."""
    named = (getattr(each, "dtype", None) for each in (config, config.get_text_config(decoder=True)))
    dtype = next((each for each in named if each is not None), None)
    if device.type == "cpu" and isinstance(dtype, torch.dtype) and dtype.itemsize < 4:
        return torch.float32
    return "auto"


def _refuse_incomplete(name: str, found: Mapping[str, Any]) -> None:
    """Refuse missing weights, which transformers would initialise. `found` is its loading report."""
    if missing := sorted(found["missing_keys"]):
        others = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise InvalidArgumentError("model", f"the files of {name} lack {missing[0]}{others}")
    if mismatched := sorted(str(key[0]) for key in found.get("mismatched_keys", ())):
        raise InvalidArgumentError("model", f"{mismatched[0]} has another shape in the files of {name}")


def _refusal(name: str, failed: str, error: Exception) -> InvalidArgumentError:
    """The refusal, with the error's type if its message alone means little."""
    if isinstance(error, StrictDataclassError) and isinstance(error.__cause__, Exception):
        # The error's own message begins with a heading.
        return _refusal(name, failed, error.__cause__)
    if not isinstance(error, OSError | ValueError | ImportError):
        failed = f"{failed}: {type(error).__name__}"
    return InvalidArgumentError("model", cause_of(name, failed, error))


def _refuse_quantised(name: str, config: Any) -> None:
    """Refuse quantised weights: they need their method's library and device, and have a fixed dtype."""
    for each in (config, config.get_text_config(decoder=True)):
        settings: Mapping[str, Any] | None = getattr(each, "quantization_config", None)
        if settings is None:
            continue
        # As in transformers: only bitsandbytes has older files that do not name the method.
        older = settings.get("load_in_4bit") or settings.get("load_in_8bit")
        method = settings.get("quant_method") or ("bitsandbytes" if older else "an unnamed method")
        raise InvalidArgumentError(
            "model", f"{name} is quantised by {method}; only unquantised checkpoints can be served"
        )


def _refuse_changing_positions(config: Any, longest: int) -> None:
    """Refuse lengths at which longrope changes.

    Beyond its original length, longrope uses other frequencies for the whole pass: also for shorter
    sequences, but not for keys that are already cached.
    """
    config = config.get_text_config(decoder=True)
    parameters = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    # One entry for all layers, or one for each kind of layer.
    either = [rope for each in parameters if isinstance(each, Mapping) for rope in (each, *each.values())]
    for rope in either:
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        name = "original_max_position_embeddings"
        original = rope.get(name) or getattr(config, name, None) or max_length_of(config)
        if longest > original:
            raise InvalidArgumentError(
                "max_model_len",
                f"must be at most {original} for {config.model_type}, got {longest}: beyond that, "
                "longrope changes positions that are already in the cache",
            )


def _vocabulary(name: str, tokenizer: Any) -> dict[str, int]:
    """Token to id, from tokenizer.json if there is one, so that a process without torch gets the same."""
    path = cached_file(
        name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, local_files_only=True
    )
    if path is not None:
        from tokenizers import Tokenizer

        vocabulary: dict[str, int] = Tokenizer.from_file(path).get_vocab(with_added_tokens=True)
        return vocabulary
    return dict(tokenizer.get_vocab())


def take_over_library_logs(*, quiet: bool) -> None:
    """Route log lines of transformers and the hub through Paceline's handler; `quiet` hides progress bars."""
    library_logging.disable_default_handler()
    # The hub's library has no such function, and both handlers would write each line.
    hub_logging.get_logger()
    logging.getLogger("huggingface_hub").handlers.clear()
    library_logging.enable_propagation()
    if quiet:
        library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
