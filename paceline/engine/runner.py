"""The core operation: feed each sequence some tokens at its end and return the requested logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError, ResourceExhaustedError
from paceline.engine.backends.interface import Backend
from paceline.engine.cache import PagedCache
from paceline.engine.cancel import CancelToken
from paceline.engine.layout import BranchInput, PassLayout, SequenceInput
from paceline.engine.memory_plan import MemoryPlan
from paceline.engine.multi_step import Chain, ChainInput, ChainSkills
from paceline.engine.state.paged import PagedStates
from paceline.kv import BlockTable, Branch

_NEVER: Final = CancelToken()


class ModelRunner:
    """A model's passes on a paged cache: checks and reservations around one backend.

    Not thread safe: one thread owns it.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        backend: Backend,
        *,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        memory_plan: MemoryPlan | None = None,
    ) -> None:
        """`vocab_size` cuts off padded logits; None keeps the width of the model's output layer."""
        self.memory_plan = memory_plan
        """What was planned on its GPU; None elsewhere."""
        config = model.config.get_text_config(decoder=True)
        if len(cache.layers) != config.num_hidden_layers:
            raise InvalidArgumentError("model", "does not have the layers the cache was made for")
        self._model = model
        self._cache = cache
        self._backend = backend
        width = output_width(model)
        self._num_embeddings = int(config.vocab_size)
        self._vocab_size = width if vocab_size is None else vocab_size
        if not 0 < self._vocab_size <= width:
            raise InvalidArgumentError("vocab_size", f"must be in [1, {width}], got {self._vocab_size}")
        longest = max_length_of(model.config)
        self._max_model_len = longest if max_model_len is None else max_model_len
        if not 0 < self._max_model_len <= longest:
            raise InvalidArgumentError(
                "max_model_len", f"must be in [1, {longest}], got {self._max_model_len}"
            )
        self._num_layers = int(config.num_hidden_layers)

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self._model

    @property
    def cache(self) -> PagedCache:
        """The cache with its pool."""
        return self._cache

    @property
    def device(self) -> torch.device:
        """The device of the model and the cache."""
        return self._cache.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and cache; logits are always float32."""
        return self._cache.dtype

    @property
    def backend(self) -> Backend:
        """The backend that computes its passes."""
        return self._backend

    @property
    def row_invariant(self) -> bool:
        """True if a row's logits are bitwise the same whatever other rows are in its pass."""
        return self._backend.skills.row_invariant

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return self._num_layers

    @property
    def vocab_size(self) -> int:
        """Width of the logits that `forward` returns."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of entries of a sequence."""
        return self._max_model_len

    def new_states(self, *, prefix_cache: bool) -> PagedStates:
        """The states of a worker's sequences, in this runner's cache."""
        return PagedStates(self._cache.pool, prefix_cache=prefix_cache)

    def new_table(self) -> BlockTable:
        """An empty block table."""
        return BlockTable(self._cache.pool)

    def forward(self, inputs: Sequence[SequenceInput]) -> Tensor:
        """Feed every sequence its tokens in one pass; returns float32 [sum of num_logits, vocab_size].

        Logits come in the order of `inputs` and of their tokens. Every table has then grown by the input's
        `entries`; `table.truncate_to` removes them. The entries of a tree's other nodes lie behind, reserved,
        until the table is truncated or reserves again. Before any change, raises ResourceExhaustedError if
        there are too few blocks and InvalidArgumentError for a malformed batch. After any other error the
        tables have their old lengths.
        """
        logits = self.forward_cancellable(inputs, _NEVER)
        assert logits is not None
        return logits

    @property
    def cancellable(self) -> bool:
        """True where a pass can be cancelled."""
        return self._backend.skills.cancellable

    def forward_cancellable(self, inputs: Sequence[SequenceInput], cancel: CancelToken) -> Tensor | None:
        """Like `forward`, but returns None if the pass is cancelled before its halfway point.

        The tables then have their old lengths.
        """
        self._check(inputs)
        with self._reserved([(item.table, len(item.token_ids)) for item in inputs]):
            logits = self._backend.forward(PassLayout.of_sequences(inputs), self._cache, cancel)
        for item in inputs:
            if logits is None:
                item.table.truncate_to(item.table.length)
            else:
                item.table.commit(len(item.entries))
        return None if logits is None else self._cut(logits)

    def forward_branches(self, inputs: Sequence[BranchInput]) -> Tensor:
        """Feed every branch one token in one pass; returns float32 [len(inputs), vocab_size].

        Every branch then has one more entry, unless an error is raised: ResourceExhaustedError if a region is
        full.
        """
        for item in inputs:
            item.branch.reserve(1)
        logits = self._backend.forward(PassLayout.of_branches(inputs), self._cache, _NEVER)
        assert logits is not None
        for item in inputs:
            item.branch.commit(1)
        return self._cut(logits)

    @property
    def chain_skills(self) -> ChainSkills | None:
        """The abilities of `forward_chains`; None if it is not supported."""
        return self._backend.skills.chains

    def forward_chains(self, inputs: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """Feed every end some tokens, then its chosen tokens one by one; returns the chosen tokens.

        A chain is shorter than its `steps` if the next logits are not a distribution or if it was cancelled.
        It is empty if it has to be drawn step by step. The ends have grown by the tokens that were fed.
        Raises ResourceExhaustedError if there are too few blocks; the tables are then unchanged.
        """
        order = sorted(range(len(inputs)), key=lambda i: -inputs[i].steps)
        ordered = [inputs[i] for i in order]
        tables = [(item.end, item.room) for item in ordered if isinstance(item.end, BlockTable)]
        with self._reserved(tables):
            for item in ordered:
                if isinstance(item.end, Branch):
                    item.end.reserve(item.room)
            layout, given_up = PassLayout.of_chains(ordered), _NEVER if cancel is None else cancel
            chosen = self._backend.draw_chains(layout, ordered, self._cache, given_up)
        for item, chain in zip(ordered, chosen, strict=True):
            item.end.commit(item.entries(chain))
            if isinstance(item.end, BlockTable):
                item.end.truncate_to(item.end.length)
        by_input = dict(zip(order, chosen, strict=True))
        return [by_input[i] for i in range(len(inputs))]

    @contextlib.contextmanager
    def _reserved(self, rooms: Sequence[tuple[BlockTable, int]]) -> Iterator[None]:
        """Reserve entries in each table, and release them if writing fails."""
        try:
            for table, count in rooms:
                self._cache.apply(table.reserve(count))
            yield
        except BaseException:
            for table, _ in rooms:
                table.truncate_to(table.length)
            raise

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy the entries of single slots; no slot may be on both sides."""
        self._cache.copy_slots(sources, destinations)

    def adopt(self, branch: Branch) -> None:
        """Make the branch's entries part of its table. The other branches must not be used afterwards.

        Raises ResourceExhaustedError; the table then ends where the branch began.
        """
        table = branch.of.trunk
        table.truncate_to(branch.kept)
        if not branch.own:
            return
        self._cache.apply(table.reserve(len(branch.own)))
        targets = table.slots(branch.kept, branch.length)
        self._cache.copy_slots([branch.of.slots[place] for place in branch.own], targets)
        table.commit(len(branch.own))

    def _cut(self, logits: Tensor) -> Tensor:
        # Slicing a tensor takes time.
        return logits if logits.shape[1] == self._vocab_size else logits[:, : self._vocab_size]

    def _check(self, inputs: Sequence[SequenceInput]) -> None:
        if not inputs:
            raise InvalidArgumentError("inputs", "a batch needs at least one sequence")
        pool = self._cache.pool
        needed = 0
        for item in inputs:
            n = len(item.token_ids)
            if n < 1:
                raise InvalidArgumentError("token_ids", "a sequence in a batch needs at least one token")
            if min(item.token_ids) < 0 or max(item.token_ids) >= self._num_embeddings:
                raise InvalidArgumentError("token_ids", f"must be in [0, {self._num_embeddings})")
            if not 0 <= item.num_logits <= n:
                raise InvalidArgumentError("num_logits", f"must be in [0, {n}], got {item.num_logits}")
            if len(item.parents) > n or (item.parents and item.table.length + n == len(item.parents)):
                raise InvalidArgumentError("parents", "a tree needs a token before it, and a token a node")
            more = len(item.entries)
            if item.table.length + more > self._max_model_len:
                raise InvalidArgumentError(
                    "token_ids",
                    f"{item.table.length} + {more} entries are more than the model's {self._max_model_len}",
                )
            if item.table.pool is not pool:
                raise InvalidArgumentError("table", "belongs to another cache")
            needed += item.table.blocks_needed(n)
        if len(inputs) > 1 and len({id(item.table) for item in inputs}) != len(inputs):
            raise InvalidArgumentError("table", "a sequence can be in a batch only once")
        if needed > pool.free_blocks:
            raise ResourceExhaustedError(
                f"the KV cache has {pool.free_blocks} of {pool.num_blocks} blocks free, {needed} are needed"
            )


def output_width(model: Any) -> int:
    """Logits per row that the model computes: the vocabulary, padding included."""
    layer = model.get_output_embeddings()
    # A quantised layer packs its weight, so the weight's shape is not informative.
    width = getattr(layer, "out_features", None)
    return int(model.config.get_text_config(decoder=True).vocab_size if width is None else width)


def max_length_of(config: Any) -> int:
    """The number of positions that a model was made for, from its config."""
    config = config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidArgumentError("model", "its config does not give a maximum sequence length")
