"""Toy models with exact distributions, and a runner whose cache really is a cache.

`ToyRunner` writes the token of every entry into the entry's slot and computes logits from what it reads
back through the block table. An entry that is missing, stale or another sequence's gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from draft_worker.drafters.model import ModelDrafter
from draft_worker.engine import DraftEngine
from paceline.core.clock import Clock, monotonic
from paceline.core.config import DraftConfig, TargetConfig
from paceline.core.types import SamplingParams
from paceline.decoding.noise import gumbel
from paceline.decoding.support import draw_sparse
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import BranchInput, SequenceInput
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.engine.state.paged import PagedStates
from paceline.engine.tree_places import TreePlaces
from paceline.kv import BlockPool, BlockTable, Branch, CopyBlock

STATES = 1009


class ToyModel:
    """Logits are a row of a random table, chosen by a rolling hash of the whole prefix."""

    def __init__(self, vocab_size: int, seed: int = 0, sharpness: float = 1.5) -> None:
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.table = (rng.standard_normal((STATES, vocab_size)) * sharpness).astype(np.float32)

    def near(self, distance: float, seed: int = 1) -> ToyModel:
        """A model that resembles this one: the draft."""
        other = ToyModel(self.vocab_size, seed)
        rng = np.random.default_rng(seed)
        noise = rng.standard_normal(self.table.shape) * distance
        other.table = (self.table + noise).astype(np.float32)
        return other

    def rows(self, prefix: Sequence[int], count: int) -> np.ndarray:
        """float32 [count, V]: the logits after each of the last `count` tokens of `prefix`."""
        states, state = [], 7
        for token in prefix:
            state = (state * 31 + token + 1) % STATES
            states.append(state)
        return self.table[states[len(states) - count :]]

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        """float32 [V] after `prefix`."""
        return self.rows(prefix, 1)[0]

    def probabilities(self, prefix: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """float64 [V]."""
        return softmax(self.logits(prefix).astype(np.float64) / temperature)


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


class ToyRunner:
    """`paceline.engine.scheduling.passes.PassRunner` over a ToyModel."""

    def __init__(self, model: ToyModel, num_blocks: int = 64, block_size: int = 4) -> None:
        self.model = model
        self.pool = BlockPool(num_blocks, block_size)
        self.memory: dict[int, int] = {}
        self.passes: list[int] = []
        """Rows of every pass that ran."""
        self.crash_on: Callable[[list[int]], Exception | None] = lambda token_ids: None
        """Looks at the tokens one sequence feeds; what it returns is raised."""
        self.spoil: Callable[[list[int]], bool] = lambda prefix: False
        """True for prefixes whose logits are to be NaN."""
        self.chain_skills: ChainSkills | None = None
        """What it can do when it draws several tokens by itself."""
        self.cancellable = False
        """Passes can be given up."""
        self.row_invariant = True
        self.longest_branch = 0
        """Entries of the longest branch so far."""
        self.stops: Callable[[CancelToken], bool] = lambda cancel: bool(cancel.flag[0])
        """Whether a chain ends before its next step, and a pass that can be given up is."""

    def new_states(self, *, prefix_cache: bool = False) -> PagedStates:
        return PagedStates(self.pool, prefix_cache=prefix_cache)

    def new_table(self) -> BlockTable:
        return BlockTable(self.pool)

    def forward_branches(self, inputs: Sequence[BranchInput]) -> torch.Tensor:
        rows = []
        for item in inputs:
            self._maybe_crash([item.token_id])
            rows.append(self._append(item.branch, item.token_id))
        self.passes.append(len(inputs))
        return torch.from_numpy(np.concatenate(rows))

    def _append(self, branch: Branch, token: int) -> np.ndarray:
        branch.reserve(1)
        branch.commit(1)
        self.longest_branch = max(self.longest_branch, branch.length)
        self.memory[branch.own_slots()[-1]] = token
        return self._row([self.memory[slot] for slot in branch.slots()])

    def forward_chains(self, inputs: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        lengths = [item.end.length for item in inputs]
        chains: list[Chain] = []
        try:
            for item in inputs:
                assert len(item.token_ids) <= self.chain_skills.max_feed
                begun, feed = item.end.length, list(item.token_ids)
                tokens, supports, others, margins = [], [], [], []
                for step in range(item.steps):
                    if step and cancel is not None and self.stops(cancel):
                        break
                    logits = self._logits_after(item.end, feed)
                    if logits.isnan().any():
                        break
                    scores = logits[0].double().numpy()
                    if item.draws is not None:
                        scores = scores / item.temperature
                        u = torch.from_numpy(item.draws.uniforms[step : step + 1])
                        scaled = logits / torch.tensor(item.temperature)
                        (token,), found = draw_sparse(scaled, u, item.draws.mass, item.draws.bound)
                        supports += found
                    else:
                        if item.noise is not None:
                            at = [item.noise.first + step]
                            noise = gumbel([item.noise.seed], at, len(scores))[0].numpy()
                            scores = scores / item.temperature + noise
                        token = int(scores.argmax())
                    ranked = [t for t in np.argsort(-scores, kind="stable").tolist() if t != token]
                    others.append(tuple(ranked[: item.num_others]))
                    margins.append(scores[token] - scores[ranked[0]])
                    tokens.append(token)
                    feed = [token]
                told = (others, margins) if item.num_others else ()
                chain = Chain(tokens, supports, *told)
                self._cut(item.end, begun + item.entries(chain))
                chains.append(chain)
        except BaseException:
            for item, length in zip(inputs, lengths, strict=True):
                self._cut(item.end, min(length, item.end.length))
            raise
        return chains

    def _logits_after(self, end: BlockTable | Branch, feed: Sequence[int]) -> torch.Tensor:
        if isinstance(end, BlockTable):
            return self.forward([SequenceInput(end, feed, 1)])
        self._maybe_crash(list(feed))
        return torch.from_numpy([self._append(end, token) for token in feed][-1])

    @staticmethod
    def _cut(end: BlockTable | Branch, length: int) -> None:
        if isinstance(end, BlockTable):
            end.truncate_to(length)
        else:
            count = length - end.kept
            end.room[:0] = end.own[count:]
            del end.own[count:]

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        for source, destination in zip(sources, destinations, strict=True):
            self.memory[destination] = self.memory[source]

    def adopt(self, branch: Branch) -> None:
        table, tokens = branch.of.trunk, [self.memory[slot] for slot in branch.slots()]
        table.truncate_to(branch.kept)
        self._apply(table.reserve(len(branch.own)))
        for position in range(branch.kept, branch.length):
            self.memory[table.slots(position, position + 1)[0]] = tokens[position]
        table.commit(len(branch.own))

    def _apply(self, copies: Sequence[CopyBlock]) -> None:
        size = self.pool.block_size
        for copy in copies:
            for offset in range(size):
                value = self.memory.get(copy.source * size + offset)
                if value is not None:
                    self.memory[copy.destination * size + offset] = value

    def read(self, table: BlockTable) -> list[int]:
        """The tokens the entries hold."""
        return [self.memory[slot] for slot in table.slots(0, table.length)]

    def _maybe_crash(self, token_ids: list[int]) -> None:
        error = self.crash_on(token_ids)
        if error is not None:
            raise error

    def forward_cancellable(
        self, inputs: Sequence[SequenceInput], cancel: CancelToken
    ) -> torch.Tensor | None:
        assert self.cancellable
        if not self.stops(cancel):
            return self.forward(inputs)
        for item in inputs:
            self._apply(item.table.reserve(len(item.token_ids)))
            for slot in item.table.slots(item.table.length, item.table.length + len(item.token_ids)):
                self.memory[slot] = -1  # half of what belongs there
            item.table.truncate_to(item.table.length)
        return None

    def forward(self, inputs: Sequence[SequenceInput]) -> torch.Tensor:
        parts = [np.empty((0, self.model.vocab_size), dtype=np.float32)]
        try:
            for item in inputs:
                self._maybe_crash(list(item.token_ids))
                assert 0 <= item.num_logits <= len(item.token_ids)
                self._apply(item.table.reserve(len(item.token_ids)))
                prefixes = self._write(item)
                parts += [self._row(prefix) for prefix in prefixes[len(prefixes) - item.num_logits :]]
        except BaseException:
            for item in inputs:
                item.table.truncate_to(item.table.length)
            raise
        for item in inputs:
            item.table.commit(len(item.entries))
        self.passes.append(sum(len(item.token_ids) for item in inputs))
        return torch.from_numpy(np.concatenate(parts))

    def _write(self, item: SequenceInput) -> list[list[int]]:
        """Write the entries of an input; returns what the row of each of its tokens sees."""
        places, start = TreePlaces.of(item.parents), item.table.length
        before, stop = len(item.token_ids) - len(item.parents), start + len(item.entries)
        slots = item.table.slots(0, start + len(item.token_ids))
        seen = [slots[: start + i + 1] for i in range(before)]
        of_node = {node: slots[: start + before + i + 1] for i, node in enumerate(places.trunk)}
        for node in places.beside:
            behind = [slots[stop + place] for place in node.own]
            of_node[node.node] = [*slots[: start + before + node.shared], *behind]
        seen += [of_node[i] for i in range(len(item.parents))]
        for line, token in zip(seen, item.token_ids, strict=True):
            self.memory[line[-1]] = token
        return [[self.memory[slot] for slot in line] for line in seen]

    def _row(self, prefix: list[int]) -> np.ndarray:
        row = self.model.rows(prefix, 1).copy()
        if self.spoil(prefix):
            row[:] = np.nan
        return row


MAX_BATCH_TOKENS = 40
"""Small enough to be met."""


def draft_config(**changes: object) -> DraftConfig:
    """A draft worker's configuration with bounds small enough to be met."""
    values = {"max_batch_tokens": MAX_BATCH_TOKENS, "support_mass": 0.98, "lookahead_branches": 0}
    return DraftConfig(model="toy", **values | changes)  # type: ignore[arg-type]


def draft_engine(
    runner: ToyRunner, config: DraftConfig, *, clock: Clock = monotonic, **rest: Any
) -> DraftEngine:
    """A draft worker without sockets whose drafter is a toy model."""
    return DraftEngine(ModelDrafter(runner, config, clock), config, clock=clock, **rest)


def target_config(**changes: object) -> TargetConfig:
    """The same for a target worker."""
    return TargetConfig(model="toy", **{"max_batch_tokens": MAX_BATCH_TOKENS} | changes)  # type: ignore[arg-type]


def forbidden(
    vocab_size: int,
    prefix: Sequence[int],
    sampling: SamplingParams,
    prompt_length: int,
    eos: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> list[int]:
    """The tokens that may not come next: early ends, those not allowed, and what would end a bad word."""
    tokens = {word[-1] for word in bad_words if (*word[:-1],) == (*prefix[len(prefix) - len(word) + 1 :],)}
    if len(prefix) - prompt_length < sampling.min_tokens:
        tokens.update(sampling.stop_token_ids, () if sampling.ignore_eos else eos)
    if sampling.allowed_token_ids is not None:
        tokens.update(set(range(vocab_size)) - set(sampling.allowed_token_ids))
    return sorted(tokens)


def own_choice(
    model: ToyModel,
    prefix: Sequence[int],
    sampling: SamplingParams,
    prompt_length: int,
    eos: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> int:
    """The token plain decoding takes next in greedy or coupled mode: argmax of log p + Gumbel noise."""
    logits = model.logits(prefix).copy()
    logits[forbidden(model.vocab_size, prefix, sampling, prompt_length, eos, bad_words)] = -np.inf
    if sampling.greedy:
        return int(logits.argmax())
    assert sampling.seed is not None
    scaled = logits.astype(np.float64) / sampling.temperature
    noise = gumbel([sampling.seed], [len(prefix)], model.vocab_size)[0].numpy()
    return int((scaled + noise).argmax())
