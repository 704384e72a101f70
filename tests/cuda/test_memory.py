"""Memory: what the pretended device counts, and that what runs there stays within the plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness.tiers import mostly_full
from torch import Tensor

from draft_worker.drafters import model as drafting
from paceline.core.config import DraftConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.captured import PATIENCE, CudaGraphs
from paceline.engine.loading import measuring
from paceline.engine.loading.measuring import PeakLoad, layout_of_many, layout_of_one
from paceline.engine.memory_plan import MemoryPlan
from paceline.engine.runner import ModelRunner
from target_worker import engine
from target_worker.largest import judge_largest
from tests.cuda import rounds
from tests.cuda.card import UNIT
from tests.cuda.device import PretendedCuda
from tests.cuda.rounds import KINDS, Kind, play
from tests.cuda.workers import SMALL, Models, draft_model, models_on, new_runner, target_model
from tests.unit.engine.runners import captured_of

DEVICE = torch.device("cuda:1")
MIB = 1 << 20
CARDS = [torch.device("cuda:0"), DEVICE]


def reserved() -> int:
    return torch.cuda.memory_reserved(DEVICE)


def test_tensors_take_memory_as_long_as_one_shows_it(cuda: PretendedCuda) -> None:
    tensor = torch.zeros(1000, device=DEVICE)
    assert torch.cuda.memory_allocated(DEVICE) == reserved() == 8 * UNIT
    assert torch.cuda.mem_get_info(DEVICE) == (cuda.memory.total - 8 * UNIT, cuda.memory.total)
    view = tensor[1:]
    del tensor
    assert torch.cuda.memory_allocated(DEVICE) == 8 * UNIT
    del view
    assert torch.cuda.memory_allocated(DEVICE) == 0
    assert reserved() == 8 * UNIT, "it is kept"
    torch.cuda.empty_cache()
    assert reserved() == torch.cuda.memory_reserved(0) == 0
    assert torch.cuda.max_memory_reserved(DEVICE) == 8 * UNIT
    torch.cuda.reset_peak_memory_stats(DEVICE)
    assert torch.cuda.max_memory_reserved(DEVICE) == 0


def test_a_full_device_is_out_of_memory(cuda: PretendedCuda) -> None:
    cuda.memory.total, cuda.memory.others = 4 * MIB, 1 * MIB
    kept = torch.zeros(2 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(MIB + 1, dtype=torch.uint8, device=DEVICE)
    del kept
    assert torch.zeros(3 * MIB, dtype=torch.uint8, device=DEVICE).shape == (3 * MIB,), "what is free is used"


def test_graphs_share_what_the_largest_needs(cuda: PretendedCuda) -> None:
    """Until the last of them is gone."""
    graphs = CudaGraphs(DEVICE)
    made = [graphs(lambda size=size: torch.zeros(size, device=DEVICE).sum()) for size in (1000, 5000, 100)]  # type: ignore[misc]
    assert cuda.memory.recorded(1) == (40 + 2) * UNIT
    torch.cuda.empty_cache()
    assert cuda.memory.recorded(1) == (40 + 2) * UNIT
    made.clear()
    torch.cuda.empty_cache()
    assert cuda.memory.recorded(1) == 0


def drafts_load(monkeypatch: pytest.MonkeyPatch) -> PeakLoad:
    """What a draft worker has measured."""
    asked: dict[str, Any] = {}

    def build(config: DraftConfig, decide: Any, *, chains: bool) -> None:
        asked.update(decide=decide, chains=chains)

    monkeypatch.setattr(drafting, "build", build)
    drafting.load(DraftConfig(model="random"))
    return replace(SMALL, **asked)


@pytest.fixture
def planned(cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> Models:
    """The target on the first device and the draft on the second, each of 32 MiB, sized by measurement."""
    monkeypatch.setattr(measuring, "BYTES_PER_RECORDING", 0)
    cuda.memory.total, cuda.memory.others = 32 * MIB, MIB
    sized = {"num_blocks": None, "share": 0.8}
    made = Models(
        new_runner(target_model(), CARDS[0], load=replace(SMALL, decide=judge_largest), **sized),
        new_runner(draft_model(), CARDS[1], load=drafts_load(monkeypatch), **sized),
    )
    monkeypatch.setattr(rounds, "models_on", lambda device: made if device in CARDS else models_on(device))
    return made


def plan_of(runner: ModelRunner) -> MemoryPlan:
    assert runner.memory_plan is not None
    return runner.memory_plan


def test_the_cache_takes_what_the_rest_leaves(cuda: PretendedCuda, planned: Models) -> None:
    for index, runner in enumerate((planned.target, planned.draft)):
        plan = plan_of(runner)
        assert runner.cache.num_blocks == plan.num_blocks
        assert plan.cache == plan.num_blocks * runner.cache.bytes_per_block
        assert min(plan.weights, plan.passes, plan.graphs, plan.cache) > 0
        allowed = int(0.8 * cuda.memory.total)
        assert allowed - runner.cache.bytes_per_block < plan.planned <= allowed
        assert cuda.memory.peak(index) <= allowed, "loading, comparing and recording included"
        assert captured_of(runner).usable


def check_within_plan(cuda: PretendedCuda, kind: Kind, models: Models) -> None:
    """Play its rounds until all is recorded, also prompts, which come once each time; then once more."""
    index, runner = (1, models.draft) if kind.drafts else (0, models.target)
    plan = plan_of(runner)
    for _ in range(1 + PATIENCE):
        play(kind, cuda, CARDS[index])
    assert cuda.memory.peak(index) <= plan.planned
    assert cuda.memory.recorded(index) <= plan.graphs
    torch.cuda.empty_cache()
    before = cuda.memory.reserved(index)
    cuda.memory.reset_peak(index)
    play(kind, cuda, CARDS[index])
    assert cuda.memory.peak(index) - before <= plan.passes
    assert captured_of(runner).usable


THIRDS = [*itertools.product((2, 0, 1), (False, True))]
"""Of the kinds of each worker, by where they begin: the first has a tree, a preemption and branches."""


@pytest.mark.parametrize(("begin", "drafts"), mostly_full(THIRDS, count=2))
def test_every_kind_of_round_stays_within_the_plan(
    cuda: PretendedCuda, planned: Models, begin: int, drafts: bool
) -> None:
    for kind in [kind for kind in KINDS if kind.drafts is drafts][begin::3]:
        check_within_plan(cuda, kind, planned)


def test_a_round_that_takes_more_is_seen(
    cuda: PretendedCuda, planned: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = engine.verify_rounds

    def greedy(rounds: Any, logits: Tensor, *more: Any) -> Any:
        torch.empty(plan_of(planned.target).passes + 1, dtype=torch.uint8, device=logits.device)
        return inner(rounds, logits, *more)

    monkeypatch.setattr(engine, "verify_rounds", greedy)
    with pytest.raises(AssertionError):
        check_within_plan(cuda, KINDS[0], planned)


def test_a_cache_beside_which_nothing_runs_is_refused(
    cuda: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "BYTES_PER_RECORDING", 0)
    cuda.memory.total = 32 * MIB
    with pytest.raises(InvalidArgumentError, match=r"at most \d+ fit") as refused:
        new_runner(target_model(), CARDS[0], num_blocks=32 * MIB // 4096 - 1)
    assert refused.value.field == "num_blocks"
    with pytest.raises(InvalidArgumentError, match="ask for at least") as refused:
        new_runner(target_model(), CARDS[1], num_blocks=None, share=0.01)
    assert refused.value.field == "gpu_memory_utilization"


def test_a_pass_that_does_not_fit_is_refused_by_name(cuda: PretendedCuda) -> None:
    def full(logits: Tensor) -> None:
        torch.empty(cuda.memory.total, dtype=torch.uint8, device=logits.device)

    with pytest.raises(InvalidArgumentError, match="a pass of 64 rows does not fit on cuda:0") as refused:
        new_runner(target_model(), CARDS[0], load=replace(SMALL, decide=full))
    assert refused.value.field == "max_batch_tokens"


LAYOUTS = [
    (64, 8, 128, 640, 16),
    (512, 256, 8192, 40_000, 16),
    (512, 256, 6000, 40_000, 16),
    (64, 8, 1, 1, 1),
]


@pytest.mark.parametrize(("rows", "sequences", "longest", "entries", "block_size"), LAYOUTS)
def test_the_largest_passes_are_of_what_is_allowed(
    rows: int, sequences: int, longest: int, entries: int, block_size: int
) -> None:
    alone = layout_of_one(rows, longest, block_size)
    many = layout_of_many(rows, sequences, longest, entries, block_size)
    for layout in (alone, many):
        assert len(layout.wanted) == layout.rows.shape[1] <= rows
        assert all(0 <= s.start < s.stop <= longest for s in layout.sequences)
        assert layout.rows[2].max() < block_size
    assert len(many.sequences) <= sequences
    lengths = [s.stop for s in many.sequences]
    assert lengths[0] == longest
    assert sum(lengths) <= entries + longest
    assert len({(length - 1).bit_length() for length in lengths}) == 1, "they share a call"
