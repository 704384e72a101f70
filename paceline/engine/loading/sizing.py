"""The number of blocks of a worker's cache: by measurement on a GPU, by a share of free memory on a CPU."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from paceline.core.errors import InvalidArgumentError
from paceline.core.limits import MAX_RUNNING_SEQUENCES
from paceline.engine.backends.interface import Backend, ServedModel
from paceline.engine.cache import bytes_per_block
from paceline.engine.cache_size import check_fits, num_blocks_on_cpu
from paceline.engine.device import is_out_of_memory
from paceline.engine.loading.measuring import PeakLoad, needs_of
from paceline.engine.memory_plan import MemoryPlan, plan_memory
from paceline.telemetry.steps import step

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a cache."""

    num_blocks: int
    plan: MemoryPlan | None
    """What else is planned on a GPU; None on a CPU."""


def cache_size(
    served: ServedModel,
    backend: Backend,
    load: PeakLoad,
    *,
    block_size: int,
    num_blocks: int | None,
    share: float | None,
    recorded: bool,
    longest: int,
) -> CacheSize:
    """The size that is asked for, or one that fits.

    Args:
        served: the model, whose weights `backend` has taken over.
        backend: computes its passes.
        load: the most that is done at once.
        block_size: positions of a block.
        num_blocks: the size that is asked for; None asks for as many blocks as fit and are of use.
        share: part of a GPU's memory for this worker.
        recorded: passes will be recorded.
        longest: entries of the longest sequence.

    Raises InvalidArgumentError naming the setting that has to change.
    """
    model = served.model
    most = MAX_RUNNING_SEQUENCES * -(-longest // block_size)
    if model.device.type == "cuda":
        step("measuring the largest passes")
        try:
            needs, card = needs_of(
                served, backend, load, block_size=block_size, recorded=recorded, longest=longest
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise InvalidArgumentError(
                "max_batch_tokens",
                f"a pass of {load.rows} rows does not fit on {model.device} beside the weights: ask for "
                "fewer, or for a shorter --max-model-len",
            ) from error
        torch.cuda.empty_cache()  # of what was measured
        plan = plan_memory(needs, card, share=share, num_blocks=num_blocks, most_blocks=most)
        log.info("%s", plan)
        return CacheSize(plan.num_blocks, plan)
    if num_blocks is None:
        fitting = num_blocks_on_cpu(served.layers, block_size, model.dtype, share)
        return CacheSize(min(fitting, most), None)
    check_fits(num_blocks, block_size, bytes_per_block(served.layers, block_size, model.dtype), model.device)
    return CacheSize(num_blocks, None)
