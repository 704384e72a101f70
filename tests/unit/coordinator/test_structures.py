"""The coordinator's check of structured_outputs in a separate process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from coordinator.app import Coordinator
from coordinator.auth import Principal, principal
from coordinator.text.structures import Structures
from coordinator.text.vocabulary import Vocabulary
from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.core.structured import StructuredOutputs
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec import GenerateCall

GOOD = StructuredOutputs(regex="[a-z]+")
BAD = StructuredOutputs(regex="(")
EOS = [0]


@pytest.fixture
async def structures(vocabulary: Vocabulary) -> AsyncIterator[Structures]:
    made = Structures(vocabulary)
    yield made
    made.close()


async def test_a_bad_structure_is_refused_by_name(structures: Structures) -> None:
    for _ in range(2):
        await structures.check(GOOD, EOS)
        with pytest.raises(InvalidArgumentError, match="regex parse error") as caught:
            await structures.check(BAD, EOS)
        assert caught.value.field == "structured_outputs.regex"


async def test_a_model_without_an_end_token_is_refused(structures: Structures) -> None:
    with pytest.raises(InvalidArgumentError, match="no end-of-sequence token") as caught:
        await structures.check(GOOD, [])
    assert caught.value.field == "structured_outputs"


async def test_results_are_remembered_for_their_caller_only(structures: Structures) -> None:
    model = structures._model(EOS)
    for name in ("", "mine"):
        token = principal.set(Principal(name))
        assert not structures._checks.passed(name, model, GOOD)
        await structures.check(GOOD, EOS)
        assert structures._checks.passed(name, model, GOOD)
        principal.reset(token)


async def test_received_tokens_must_follow_the_structure(
    structures: Structures, vocabulary: Vocabulary
) -> None:
    """Otherwise a resumed request would look like a worker's internal error."""
    fine, wrong = vocabulary.encode("abc"), vocabulary.encode("a1")
    await structures.check(GOOD, EOS)
    await structures.check_received(GOOD, EOS, [fine, [], fine[:1]])
    with pytest.raises(InvalidArgumentError) as caught:
        await structures.check_received(GOOD, EOS, [fine, wrong])
    assert caught.value.field == "received"


async def test_a_drain_ends_the_compiling_process(served: Coordinator) -> None:
    await served._structures.check(GOOD, EOS)
    assert served._structures.process.pid is not None
    await served.drain(0)
    assert served._structures.process.pid is None
    call = GenerateCall("r", (5,), SamplingParams(structured_outputs=BAD), SpeculationParams())
    with pytest.raises(UnavailableError):
        async with served.generating(call):
            pass
    with pytest.raises(UnavailableError, match="stopping"):
        await served._structures.check(BAD, EOS)
