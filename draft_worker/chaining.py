"""What is left of proposals whose tokens the model can choose by itself: no step of them needs Python."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafting import Round
from draft_worker.propose import draws_alone
from draft_worker.runner import Runner
from paceline.core.config import WorkerConfig
from paceline.decoding.noise import Purpose, uniforms
from paceline.decoding.support import draw_sparse
from paceline.engine.batch import SequenceInput
from paceline.engine.chains import ChainInput, ChainSkills, SparseDraws


def chains_of(
    rounds: Sequence[Round],
    skills: ChainSkills | None,
    config: WorkerConfig,
    eos_token_ids: Sequence[int],
    num_others: int,
) -> list[tuple[Round, ChainInput]]:
    """The rounds that a runner with these skills can complete, after their first token."""
    if skills is None or (num_others and not skills.ranks):
        return []  # what a branch's first token could have been is seen in the logits of every step
    chains = ((r, _chain_of(r, config, eos_token_ids, num_others)) for r in rounds)
    return [(r, c) for r, c in chains if c is not None and (c.draws is None or skills.supports)]


def _chain_of(
    r: Round, config: WorkerConfig, eos_token_ids: Sequence[int], num_others: int
) -> ChainInput | None:
    """What completes a proposal; None where each token must be looked at."""
    drafting, table = r.drafting, r.job.held.table
    params, begun, tape = drafting.params, len(drafting.drawn), drafting.tape
    if begun == drafting.k or drafting.grammar is not None or not draws_alone(params, eos_token_ids):
        return None
    noise = None if tape.coupled is None else tape.coupled.part(begun, drafting.k)
    draws = None
    if tape.uniforms is not None:
        uniforms_left = tape.uniforms[begun : drafting.k].numpy()
        draws = SparseDraws(uniforms_left, config.support_mass, config.support_bound)
    temperature = 0.0 if params.sampling.greedy else params.sampling.temperature
    return ChainInput(table, drafting.newest, drafting.k - begun, temperature, noise, draws, num_others)


def warm_up(runner: Runner, *, chains: bool) -> None:
    """Have what draws compiled before anybody waits for it."""
    table = runner.new_table()
    logits = runner.forward([SequenceInput(table, [0], 1)])
    draw_sparse(logits, uniforms([0], [0], Purpose.DRAFT_DRAW, 1)[0], 1.0, 1)
    if chains and runner.chain_skills is not None:
        runner.forward_chains([ChainInput(table, 0, 1)])
    table.free()
