"""What is compiled."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.structured import StructuredOutputs
from paceline.grammar import Grammars


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[StructuredOutputs]:
    """What was compiled."""
    calls: list[StructuredOutputs] = []
    right = Grammars._compile

    def counting(self: Grammars, wanted: StructuredOutputs, tokenizer: Any) -> Any:
        calls.append(wanted)
        return right(self, wanted, tokenizer)

    monkeypatch.setattr(Grammars, "_compile", counting)
    return calls
