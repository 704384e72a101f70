"""What is left of proposals whose tokens the model can choose by itself: no step of them needs Python."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafting import Drafting
from draft_worker.propose import draws_alone
from draft_worker.runner import Runner
from paceline.engine.chains import ChainInput
from paceline.kv import BlockTable


def chain_of(drafting: Drafting, table: BlockTable, eos_token_ids: Sequence[int]) -> ChainInput | None:
    """The chain that completes a proposal with a first token; None where each token must be looked at."""
    params, begun = drafting.params, len(drafting.drawn)
    if begun == drafting.k or drafting.grammar is not None or not draws_alone(params, eos_token_ids):
        return None
    noise = None if drafting.tape.gumbel is None else drafting.tape.gumbel[begun : drafting.k].numpy()
    temperature = 0.0 if params.sampling.greedy else params.sampling.temperature
    return ChainInput(table, drafting.newest, drafting.k - begun, temperature, noise)


def warm_up(runner: Runner) -> None:
    """Have the chain compiled before anybody waits for it."""
    if runner.draws_chains:
        table = runner.new_table()
        runner.forward_chains([ChainInput(table, 0, 1)])
        table.free()
