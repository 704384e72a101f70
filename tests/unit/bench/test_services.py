"""How the services under measurement are run. None is started."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.bench import services
from paceline.bench.config import QUICK
from paceline.supervisor import StackConfig


class Started(Exception):  # noqa: N818 - no error, an end
    """With what."""


def test_every_request_computes_its_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As peers do, and whichever arm asked for the same prompt before."""

    def serve_stack(config: StackConfig, **more: Any) -> Any:
        raise Started(config)

    monkeypatch.setattr(services, "serve_stack", serve_stack)
    with pytest.raises(Started) as started, services.serve(QUICK, [(1, 2)], print):
        pass
    (config,) = started.value.args
    assert not config.worker_config("target").prefix_cache
    assert not config.worker_config("draft").prefix_cache
