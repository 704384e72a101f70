"""What is left of proposals whose tokens the model can choose by itself: no step of them needs Python."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafting import Drafting
from draft_worker.propose import draws_alone
from draft_worker.runner import Runner
from paceline.decoding.noise import Purpose, uniforms
from paceline.decoding.support import draw_sparse
from paceline.engine.batch import SequenceInput
from paceline.engine.chains import ChainInput, SparseDraws
from paceline.kv import BlockTable


def chain_of(
    drafting: Drafting,
    table: BlockTable,
    eos_token_ids: Sequence[int],
    support_mass: float,
    support_bound: int,
) -> ChainInput | None:
    """The chain that completes a proposal with a first token; None where each token must be looked at."""
    params, begun, tape = drafting.params, len(drafting.drawn), drafting.tape
    if begun == drafting.k or drafting.grammar is not None or not draws_alone(params, eos_token_ids):
        return None
    noise, draws = None, None
    if tape.gumbel is not None:
        noise = tape.gumbel[begun : drafting.k].numpy()
    if tape.uniforms is not None:
        draws = SparseDraws(tape.uniforms[begun : drafting.k].numpy(), support_mass, support_bound)
    temperature = 0.0 if params.sampling.greedy else params.sampling.temperature
    return ChainInput(table, drafting.newest, drafting.k - begun, temperature, noise, draws)


def warm_up(runner: Runner, *, chains: bool) -> None:
    """Have what draws compiled before anybody waits for it."""
    table = runner.new_table()
    logits = runner.forward([SequenceInput(table, [0], 1)])
    draw_sparse(logits, uniforms([0], [0], Purpose.DRAFT_DRAW, 1)[0], 1.0, 1)
    if chains and runner.draws_chains:
        runner.forward_chains([ChainInput(table, 0, 1)])
    table.free()
