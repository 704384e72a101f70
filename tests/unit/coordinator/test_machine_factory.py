"""When prompt lookup is used: by the request, else by the server where a seed keeps its tokens."""

from __future__ import annotations

import pytest

from coordinator.requests.machine_factory import Machines
from paceline.core.config import CoordinatorConfig
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams, SpeculationParams
from paceline.core.validation import AUTO, DraftTokens


def looks_up(
    mode: AcceptanceMode,
    *,
    server: bool = True,
    asked: bool | None = None,
    k: DraftTokens = 4,
    temperature: float = 1.0,
) -> bool:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="t", prompt_lookup=server)
    params = SequenceParams(SamplingParams(temperature=temperature, seed=1), mode, 1)
    machines = Machines(config, None)  # type: ignore[arg-type]
    return bool(machines._sources(SpeculationParams(prompt_lookup=asked), k, params))


@pytest.mark.parametrize("mode", list(AcceptanceMode))
@pytest.mark.parametrize("server", [True, False])
def test_a_requests_prompt_lookup_setting_decides(mode: AcceptanceMode, server: bool) -> None:
    assert looks_up(mode, server=server, asked=True)
    assert not looks_up(mode, server=server, asked=False)


@pytest.mark.parametrize("mode", list(AcceptanceMode))
def test_otherwise_the_servers_setting_decides(mode: AcceptanceMode) -> None:
    assert looks_up(mode, k=AUTO)
    assert looks_up(mode, temperature=0.0)
    assert not looks_up(mode, k=AUTO, server=False)


def test_prompt_lookup_keeps_a_seeds_tokens_with_fixed_k() -> None:
    assert looks_up(AcceptanceMode.COUPLED)
    assert not looks_up(AcceptanceMode.REJECTION)
    assert not looks_up(AcceptanceMode.BLOCK)
