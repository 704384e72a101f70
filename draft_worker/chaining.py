"""What is left of proposals whose tokens the model can choose by itself: no step of them needs Python."""

from __future__ import annotations

from collections.abc import Sequence

from draft_worker.drafting import Drafting
from draft_worker.propose import draws_alone
from draft_worker.runner import Runner
from paceline.core.config import DraftConfig
from paceline.decoding.coupled import ranked
from paceline.decoding.noise import CoupledNoise, Purpose, uniforms
from paceline.decoding.support import draw_sparse
from paceline.engine.batch import SequenceInput
from paceline.engine.multi_step import ChainInput, ChainSkills, SparseDraws
from paceline.kv import BlockTable, Branch


def can_chain(drafting: Drafting, skills: ChainSkills | None, eos_token_ids: Sequence[int]) -> bool:
    """True when a runner with these skills can draw all that is left of it."""
    if skills is None or drafting.grammar is not None or not draws_alone(drafting.params, eos_token_ids):
        return False
    return drafting.tape.uniforms is None or skills.supports


def chain_of(
    drafting: Drafting,
    end: BlockTable | Branch,
    feed: Sequence[int],
    config: DraftConfig,
    num_others: int,
) -> ChainInput:
    """What completes a drafting that can be a chain; `feed` ends with its newest token."""
    begun, tape, sampling = len(drafting.drawn), drafting.tape, drafting.params.sampling
    noise = None if tape.coupled is None else tape.coupled.after(begun)
    draws = None
    if tape.uniforms is not None:
        uniforms_left = tape.uniforms[begun : drafting.k].numpy()
        draws = SparseDraws(uniforms_left, config.support_mass, config.support_bound)
    temperature = 0.0 if sampling.greedy else sampling.temperature
    return ChainInput(end, feed, drafting.k - begun, temperature, noise, draws, num_others)


def warm_up(runner: Runner) -> None:
    """Have what draws compiled before anybody waits for it; rounds and what is drafted ahead use the same."""
    table = runner.new_table()
    logits = runner.forward([SequenceInput(table, [0], 1)])
    draw_sparse(logits, uniforms([0], [0], Purpose.DRAFT_DRAW, 1)[0], 1.0, 1)
    ranked(logits, [CoupledNoise(0, 0)], 1)
    if runner.chain_skills is not None:
        runner.forward_chains([ChainInput(table, [0], 1)])
    table.free()
