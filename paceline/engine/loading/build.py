"""From a worker's configuration to a ready runner: device, threads, weights, cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import assets
from paceline.core.config import DraftConfig, WorkerConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.system.cores import within_quota
from paceline.decoding.cpu.kernel_cache import warn_of_what_is_not_kept
from paceline.engine.backends.captured import CudaGraphs, Recorder
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import DEFAULT_BLOCK_SIZE
from paceline.engine.cache_size import check_before_weights
from paceline.engine.device import is_out_of_memory, keep_attention_from_cudnn, make_current
from paceline.engine.loading.measuring import PeakLoad
from paceline.engine.loading.model import (
    DTYPES,
    LoadedModel,
    load_model,
    load_vocabulary,
    make_runner,
)
from paceline.engine.loading.model_fingerprint import model_fingerprint
from paceline.engine.memory_plan import MemoryPlan
from paceline.engine.runner import ModelRunner
from paceline.kv import BlockPool
from paceline.telemetry.steps import step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """The loaded parts of a worker: a model on its cache, or its vocabulary alone."""

    loaded: LoadedModel
    runner: ModelRunner | None
    """None without weights."""
    max_model_len: int
    num_parameters: int
    weight_bytes: int
    """Bytes that a decode step reads."""
    model_fingerprint: str = ""
    """Distinguishes models by their weights; empty without any."""

    @property
    def device(self) -> torch.device:
        """The device of the computation."""
        return torch.device("cpu") if self.runner is None else self.runner.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        return torch.float32 if self.runner is None else self.runner.dtype

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """What was planned on its GPU; None without one."""
        return None if self.runner is None else self.runner.memory_plan

    @property
    def pool(self) -> BlockPool | None:
        """The blocks of its cache; None without one."""
        return None if self.runner is None else self.runner.cache.pool


def choose_device(name: str) -> torch.device:
    """The device; `auto` is CUDA if available. Raises InvalidArgumentError if this torch lacks the device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgumentError("device", f"{name!r} is not a device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        cuda = torch.version.cuda
        why = f"the driver may be too old for torch's CUDA {cuda}" if cuda else "this torch has no CUDA"
        raise InvalidArgumentError("device", f"no CUDA device is available to this process; {why}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError("device", f"{name}: there are {torch.cuda.device_count()} CUDA devices")
    return device


def build(
    config: WorkerConfig, decide: Callable[[Tensor], object] = lambda logits: None, *, chains: bool = False
) -> Built:
    """Load the model and make its cache. The calling thread then works on their device.

    On a GPU the cache gets what the largest pass leaves, and what follows it: `decide` is called once with
    float32 [rows, vocabulary]. `chains`: the worker draws chains. Raises InvalidArgumentError naming the
    field.
    """
    _prepare_process(config)
    device = choose_device(config.device)
    make_current(device)
    keep_attention_from_cudnn(device)
    try:
        return _build_on(device, config, decide, chains)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InvalidArgumentError(
            "num_blocks",
            f"{device} has no room for {config.model} and its cache; another process may be using it. "
            "Reduce the cache (--num-blocks), or use another device (--device cuda:1)",
        ) from error


def build_vocabulary(config: WorkerConfig) -> Built:
    """Load the model's tokenizer and configuration, for a drafter that needs no weights.

    Raises InvalidArgumentError naming the field.
    """
    _prepare_process(config)
    step("loading the tokenizer of %s; missing files are fetched first", config.model)
    loaded = load_vocabulary(assets.resolve(config.model), trust_remote_code=config.trust_remote_code)
    return Built(loaded, None, _length(config, loaded.max_model_len), num_parameters=0, weight_bytes=0)


def _prepare_process(config: WorkerConfig) -> None:
    """Set up the libraries before they load anything."""
    if threads := config.threads or _threads_within_quota():
        torch.set_num_threads(threads)
    warn_of_what_is_not_kept()
    # No hub queries and no telemetry while a request waits.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Hub weights that are not safetensors are refused, not replaced by those of a pull request.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "true")


def _build_on(
    device: torch.device, config: WorkerConfig, decide: Callable[[Tensor], object], chains: bool
) -> Built:
    name = assets.resolve(config.model)
    if config.num_blocks is not None:
        check_before_weights(
            name,
            device,
            num_blocks=config.num_blocks,
            block_size=config.block_size or DEFAULT_BLOCK_SIZE,
            dtype=DTYPES.get(config.dtype),
            trust_remote_code=config.trust_remote_code,
        )
    step("loading %s; missing files are fetched first", config.model)
    loaded = load_model(
        name,
        device=device,
        dtype=None if config.dtype == "auto" else config.dtype,
        trust_remote_code=config.trust_remote_code,
        scale=assets.scale_of(config.model),
    )
    num_parameters = sum(p.numel() for p in loaded.model.parameters())
    fingerprint = model_fingerprint(loaded.model)  # backends may change how the weights are stored
    max_model_len = _length(config, loaded.max_model_len)
    runner = make_runner(
        loaded,
        block_size=config.block_size,
        num_blocks=config.num_blocks,
        memory_share=config.gpu_memory_utilization,
        load=PeakLoad(config.max_batch_tokens, config.max_sequences, chains, decide),
        max_model_len=max_model_len,
        backends=BACKENDS,
        deterministic=config.deterministic,
        attention_backend=config.attention_backend,
        new_recorder=_recorders(device) if config.cuda_graphs and device.type == "cuda" else None,
    )
    # A sequence cannot be longer than the whole cache.
    if (room := runner.cache.pool.num_blocks * runner.cache.block_size) < max_model_len:
        log.warning("sequences of %s are up to %d tokens long: its cache holds no more", config.model, room)
        max_model_len = room
    log.info(
        "%s on %s: %d parameters, %d cache blocks of %d",
        config.model,
        device,
        num_parameters,
        runner.cache.pool.num_blocks,
        runner.cache.block_size,
    )
    return Built(loaded, runner, max_model_len, num_parameters, runner.backend.weight_bytes, fingerprint)


def _length(config: WorkerConfig, longest: int) -> int:
    """The maximum sequence length. `serve` passes the target's; a draft model may have less."""
    asked = config.max_model_len or longest
    if asked <= longest:
        return asked
    if not isinstance(config, DraftConfig):
        raise InvalidArgumentError(
            "max_model_len", f"must be at most {longest}, the length of {config.model}, got {asked}"
        )
    log.warning("%s drafts for sequences of up to %d tokens only, not %d", config.model, longest, asked)
    return longest


def _recorders(device: torch.device) -> Callable[[], Recorder]:
    """Makes recorders of one device, which share a stream."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return lambda: CudaGraphs(device, stream)


def _threads_within_quota() -> int:
    """Threads within the CPU quota if torch would use more; else 0, which keeps torch's choice."""
    chosen = torch.get_num_threads()
    threads = within_quota(chosen)
    return threads if threads < chosen else 0
