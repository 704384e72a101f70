"""The most memory that a worker takes against the share it was given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from paceline.core.errors import ResourceExhaustedError
from paceline.core.types import AcceptanceMode
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.measuring import PeakLoad
from paceline.engine.loading.model import make_runner
from paceline.engine.runner import ModelRunner
from target_worker.largest import judge_largest
from target_worker.verify import verify_items
from tools.gpu_check.checks.judging import WARM, items_of
from tools.gpu_check.device import release
from tools.gpu_check.models import new_model, tables_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import BLOCK_SIZE, K

_SHARE = 0.85
"""Of the device's whole memory, as with --gpu-memory-utilization."""
_ROWS = 512
"""Rows of the largest pass: the default of --max-batch-tokens."""
_JUDGED = _ROWS // (K + 1)


def _cases(bench: Bench) -> Iterator[Case]:
    for shape in (bench.sizes.target, bench.sizes.small):
        yield f"{shape.name}, share {_SHARE:g}", lambda shape=shape: _measured(bench, shape)


def _measured(bench: Bench, shape: Any) -> Figures:
    device, sizes = bench.device, bench.sizes
    release()
    with device.peak_bytes():
        model = new_model(device, shape, sizes.dtype)
        runner = make_runner(
            model,
            block_size=BLOCK_SIZE,
            memory_share=_SHARE,
            load=PeakLoad(_ROWS, decide=judge_largest),
            max_model_len=min(shape.longest, 32_768),
            backends=BACKENDS,
            new_recorder=device.new_recorder,
        )
        _largest_passes(runner, sizes.sequences, sizes.keys)
        _largest_judgement(runner)
        peak = device.reserved_peak()
    cache = runner.cache
    free, total = torch.cuda.mem_get_info(device.torch)
    figures = {
        "plan_GiB": _SHARE * total / 2**30,
        "peak_GiB": None if peak is None else peak / 2**30,
        "cache_GiB": cache.num_blocks * cache.bytes_per_block / 2**30,
        "weights_GiB": runner.backend.weight_bytes / 2**30,
        "free_at_end_GiB": free / 2**30,
    }
    if peak is not None and peak > _SHARE * total:
        raise Failed("the worker takes more than its share", figures)
    return figures


def _largest_passes(runner: ModelRunner, sequences: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """A whole prompt's chunk behind many entries, and decode steps of as many entries as fit."""
    room = runner.cache.pool.free_blocks * runner.cache.block_size
    longest = min(max(keys), runner.max_model_len - _ROWS) if runner.max_model_len > 2 * _ROWS else 1
    rows = min(_ROWS, runner.max_model_len - longest)
    for count, length, fed in (
        (1, longest, rows),
        *((count, min(each, room // count - BLOCK_SIZE * 2), 1) for count in sequences for each in keys),
    ):
        if length < 1:
            continue
        tables = tables_of(runner, count, length, fed)
        try:
            for _ in range(3):  # launched, recorded, replayed
                runner.forward([SequenceInput(table, [5] * fed, 1) for table in tables])
                for table in tables:
                    table.truncate_to(length)
        except ResourceExhaustedError as error:
            raise Failed(str(error)) from error
        finally:
            for table in tables:
                table.free()


def _largest_judgement(runner: ModelRunner) -> None:
    logits = torch.randn(_JUDGED * (K + 1), runner.vocab_size, device=runner.device)
    for mode in AcceptanceMode:
        verify_items(items_of(_JUDGED, mode, WARM), logits, logits)


CHECK = Check("memory", "the largest passes and judgements within a worker's share", _cases, minutes=1.0)
