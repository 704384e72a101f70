"""Settings of a benchmark: used, or refused by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.commands import command
from harness.refusals import refused

from paceline.bench import FULL, QUICK
from paceline.bench.arms import AGAIN, PLAIN, automatic, paceline_arms, rotated, served
from paceline.bench.config import BenchConfig
from paceline.bench.prompts import PROMPTS
from paceline.bench.services import blocks_needed
from paceline.cli.commands import bench
from paceline.cli.commands.bench import configured
from paceline.core.errors import UnavailableError
from paceline.core.types import AcceptanceMode
from paceline.engine.backends.cache_attention.varlen import BLOCK


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("k", (0,)),
        ("k", (33,)),
        ("k", (4, 4)),
        ("k", ()),
        ("concurrency", (0,)),
        ("temperature", ()),
        ("temperature", (-1.0,)),
        ("max_tree_nodes", (0,)),
        ("max_tree_nodes", (65,)),
        ("max_tree_nodes", (8, 8)),
        ("tree_width", 1),
        ("tree_width", 65),
        ("dtype", "int4"),
        ("threads", 0),
        ("repeats", 0),
        ("num_prompts", len(PROMPTS) + 1),
        ("max_tokens", 1),
    ],
)
def test_invalid_settings_are_refused_by_field(field: str, value: Any) -> None:
    with refused(field):
        replace(FULL, **{field: value})


def test_trees_are_refused_where_requests_for_them_would_be() -> None:
    block = replace(FULL, acceptance=AcceptanceMode.BLOCK)
    with refused("max_tree_nodes"):
        replace(block, max_tree_nodes=(8,))
    assert replace(block, max_tree_nodes=(8,), temperature=(0.0,)).max_tree_nodes == (8,)


def test_the_command_refuses_invalid_settings() -> None:
    done = command("bench", "--k", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --k: must be in")


def test_options_override_the_preset() -> None:
    assert configured(QUICK, {"k": None, "temperature": [], "repeats": None}) == QUICK
    changed = configured(QUICK, {"k": [3, 5], "max_tree_nodes": [8], "repeats": 7, "peers": False})
    assert changed == replace(QUICK, k=(3, 5), max_tree_nodes=(8,), repeats=7, peers=False)


def test_the_command_uses_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, looked_for = [], []

    def run_bench(config: BenchConfig, **more: Any) -> Any:
        asked.append(config)
        raise UnavailableError("nothing runs here")

    monkeypatch.setattr(bench, "run_bench", run_bench)
    # This machine may have no GPU: that they are looked for is what counts here.
    monkeypatch.setattr(bench, "check_gpu", lambda *asked_for: looked_for.append(asked_for))
    for options in ([], ["--device", "cuda:0", "--draft-device", "cuda:1"]):
        command("bench", "--quick", *options)
    assert asked == [QUICK, replace(QUICK, device="cuda:0", draft_device="cuda:1")]
    plain_run, on_gpus = looked_for[:2], looked_for[2:]
    assert plain_run == [("device", "auto"), ("draft_device", "auto")]
    assert on_gpus == [("device", "cuda:0"), ("draft_device", "cuda:1")]


def test_the_command_refuses_a_missing_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.core.system.gpus._torch_build", lambda: "2.13.0+cpu")
    done = command("bench", "--quick", "--draft-device", "cuda:1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --draft-device: cuda:1 needs torch with CUDA")


def test_every_k_runs_with_and_without_lookahead() -> None:
    arms = paceline_arms(FULL, 1)
    assert arms[0] is PLAIN
    for k in FULL.k:
        assert {arm.lookahead for arm in arms if arm.k == k} == {True, False}
    assert len(set(arms)) == len(arms)


@pytest.mark.parametrize("concurrency", [1, 8])
def test_trees_run_beside_chains_if_asked_for(concurrency: int) -> None:
    chains = paceline_arms(FULL, concurrency)
    assert {arm.tree_width for arm in chains} == {None}
    asked = replace(FULL, max_tree_nodes=(8, 16), tree_width=3)
    more = set(paceline_arms(asked, concurrency)) - set(chains)
    assert {(arm.k, arm.tree_width, arm.max_tree_nodes) for arm in more} == {(4, 3, 8), (4, 3, 16)}
    assert {arm.lookahead for arm in more} == {FULL.drafts_ahead}


@pytest.mark.parametrize("ks", [(4,), (4, 8), (4, 8, 2)])
def test_plain_arms_are_spread_around_the_ring(ks: tuple[int, ...]) -> None:
    ring = paceline_arms(replace(FULL, k=ks), 8)
    assert {arm.k for arm in ring} == {0, "auto", *ks}
    apart = abs(ring.index(PLAIN) - ring.index(AGAIN))
    assert apart in (len(ring) // 2, (len(ring) + 1) // 2)


def test_every_arm_comes_first_once() -> None:
    arms = paceline_arms(QUICK, 1)
    assert {rotated(arms, by)[0] for by in range(len(arms))} == set(arms)
    assert all(set(rotated(arms, by)) == set(arms) for by in range(20))


def test_the_pool_holds_all_requests_at_once() -> None:
    config = replace(QUICK, concurrency=(3, 5), max_tokens=80)
    tokens = 40 + 120 + config.k[0]
    chains = blocks_needed(config, [(1,) * 40, (1,)])
    assert chains * config.block_size >= 5 * tokens
    with_trees = blocks_needed(replace(config, max_tree_nodes=(40, 8)), [(1,) * 40, (1,)])
    assert (with_trees - chains) * config.block_size >= 5 * 2 * 40


@pytest.mark.parametrize(("cores", "ahead"), [(1, False), (2, True), (4, True)])
def test_the_service_chooses_k_as_serve_would(
    monkeypatch: pytest.MonkeyPatch, cores: int, ahead: bool
) -> None:
    """Where two models have no core each, `paceline serve` does not draft ahead."""
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: tuple(range(cores)))
    config = replace(FULL, device="cpu")
    arms = paceline_arms(config, 8)
    assert automatic(config).lookahead is ahead
    assert served(config).lookahead is ahead
    assert [arm for arm in arms if arm.prompt_lookup] == [served(config)]
    assert {arm.lookahead for arm in arms if arm.k in config.k} == {ahead}


def test_a_gpu_draft_drafts_ahead_of_a_cpu_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: (0,))
    assert not replace(FULL, device="cpu").drafts_ahead
    assert replace(FULL, device="cpu", draft_device="cuda").drafts_ahead


def test_blocks_on_a_gpu_can_be_read_in_place() -> None:
    assert replace(FULL, device="cpu").block_size == 16
    assert replace(FULL, device="cuda").block_size == BLOCK
