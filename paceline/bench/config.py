"""Settings of a benchmark run: frozen, validated on construction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.bench.prompts import PROMPTS
from paceline.bench.workload import LENGTH_SPREAD
from paceline.core import limits
from paceline.core.config import DTYPES
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams
from paceline.core.validation import device, tree_nodes
from paceline.supervisor import StackConfig


def _check(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InvalidArgumentError(name, message)


def _check_list(name: str, values: Collection[object]) -> None:
    _check(bool(values), name, "must have at least one value")
    _check_unique(name, values)


def _check_unique(name: str, values: Collection[object]) -> None:
    _check(len(set(values)) == len(values), name, "has a repeated value")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """Settings of one run."""

    target_model: str = "embedded:target@7"
    """Enlarged by default, because passes of the small target are so short that messaging dominates."""
    draft_model: str = "embedded:draft"
    device: str = "auto"
    """Device of all models, including the peers'."""
    draft_device: str | None = None
    """Device of Paceline's draft; None takes `device`."""
    dtype: str = "auto"
    threads: int = 1
    """CPU threads of each model, including the peers'."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    acceptance: AcceptanceMode = AcceptanceMode.COUPLED
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    k: tuple[int, ...] = (4, 8, 2)
    """Fixed values of K, in addition to 0; transformers' assisted generation uses the first."""
    max_tree_nodes: tuple[int, ...] = ()
    """Numbers of nodes of the trees to measure, which are as deep as the first K; none by default."""
    tree_width: int = 4
    """Most children of a node of these trees."""
    max_tokens: int = 128
    """Tokens of each request; the average with several requests at a time."""
    repeats: int = 2
    """Measured runs of every arm on every workload, after warm-up; peers run once."""
    num_prompts: int = len(PROMPTS)
    """Number of prompts; at concurrency 1, each is a separate workload."""
    peers: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        for name in ("temperature", "concurrency", "k"):
            _check_list(name, getattr(self, name))
        device("device", self.device)
        if self.draft_device is not None:
            device("draft_device", self.draft_device)
        _check(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}, got {self.dtype}")
        _check(self.threads >= 1, "threads", f"must be at least 1, got {self.threads}")
        _check(self.max_tokens >= 2, "max_tokens", "must be at least 2: rates exclude the first token")
        for value in self.temperature:
            SamplingParams(temperature=value, max_tokens=self.max_tokens)
        for k in self.k:
            _check(
                1 <= k <= limits.MAX_SPECULATIVE_TOKENS,
                "k",
                f"must be in [1, {limits.MAX_SPECULATIVE_TOKENS}], got {k}; 0 is always measured",
            )
        for n in self.concurrency:
            _check(
                1 <= n <= limits.MAX_RUNNING_SEQUENCES,
                "concurrency",
                f"must be in [1, {limits.MAX_RUNNING_SEQUENCES}], got {n}",
            )
        self._check_trees()
        _check(self.repeats >= 1, "repeats", f"must be at least 1, got {self.repeats}")
        most = len(PROMPTS)
        _check(
            1 <= self.num_prompts <= most, "num_prompts", f"must be in [1, {most}], got {self.num_prompts}"
        )

    def _check_trees(self) -> None:
        name = "max_tree_nodes"
        _check_unique(name, self.max_tree_nodes)
        for nodes in self.max_tree_nodes:
            tree_nodes(name, nodes)
        most = limits.MAX_TREE_WIDTH
        _check(2 <= self.tree_width <= most, "tree_width", f"must be in [2, {most}], got {self.tree_width}")
        chains = self.acceptance.facts.whole_chain and max(self.temperature) > 0
        _check(
            not (self.max_tree_nodes and chains),
            name,
            f"needs another acceptance mode: {self.acceptance.value} takes no trees above temperature 0",
        )

    @property
    def measures_load(self) -> bool:
        """True if some workload has several requests at a time."""
        return max(self.concurrency) > 1

    @property
    def longest_answer(self) -> int:
        """Most tokens of an answer: lengths vary with several requests at a time."""
        return self.max_tokens + (int(self.max_tokens * LENGTH_SPREAD) if self.measures_load else 0)

    @property
    def measures_peers(self) -> bool:
        """True if peers are measured. They decode one request at a time."""
        return self.peers and 1 in self.concurrency

    @property
    def drafts_ahead(self) -> bool:
        """True if `paceline serve` drafts ahead by default on these devices; automatic K is measured so."""
        return self._serving.draft_config.lookahead_branches > 0

    @property
    def block_size(self) -> int:
        """Positions in a cache block: on a GPU as many as attention in place needs."""
        return 256 if self._serving.may_use_gpus else 16

    @property
    def _serving(self) -> StackConfig:
        return StackConfig(target_device=self.device, draft_device=self.device_of_draft)

    @property
    def device_of_draft(self) -> str:
        """Device of Paceline's draft."""
        return self.device if self.draft_device is None else self.draft_device


FULL = BenchConfig()
QUICK = replace(FULL, concurrency=(1,), k=(4,), max_tokens=40, num_prompts=2)
"""Only the ratios at one request at a time; takes a few minutes."""
