"""Structure checks before a worker's engine: held commands, refusals, and other sequences."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, PacelineError, ResourceExhaustedError
from paceline.core.messages import CloseSequence, OpenSequence, SequenceFailed, VerifyRound
from paceline.core.structured import StructuredOutputs
from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.grammar import Grammars, compiler
from paceline.rpc.streams import structures as structures_module
from paceline.rpc.streams.structures import StructureGuard
from tests.unit.grammar.tiny import grammars

PLAIN = SamplingParams(seed=1)
REFUSED = InvalidArgumentError("structured_outputs.regex", "takes too long to compile")


def opening(name: str, regex: str = "", epoch: int = 1, salt: str = "") -> OpenSequence:
    sampling = SamplingParams(seed=1, structured_outputs=StructuredOutputs(regex=regex)) if regex else PLAIN
    params = SequenceParams(sampling, AcceptanceMode.COUPLED, 1, cache_salt=salt)
    return OpenSequence(name, epoch, (1,), params)


def verify(name: str, number: int = 1) -> VerifyRound:
    return VerifyRound(name, 1, number, 1, (), Proposal())


class FakeChecks:
    """Answers when the test says so; knows what passed, by salt."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.given_up: list[str] = []
        self.closed = False
        self._fine: set[tuple[str, StructuredOutputs]] = set()
        self._may_answer: dict[str, asyncio.Future[PacelineError | None]] = {}

    def _answer(self, regex: str) -> asyncio.Future[PacelineError | None]:
        return self._may_answer.setdefault(regex, asyncio.get_running_loop().create_future())

    def answer(self, regex: str, error: PacelineError | None = None) -> None:
        self._answer(regex).set_result(error)

    def passed(self, tenant: str, model: Any, wanted: StructuredOutputs) -> bool:
        return (tenant, wanted) in self._fine

    async def check(self, tenant: str, model: Any, wanted: StructuredOutputs) -> None:
        regex = str(wanted.regex)
        self.asked.append((tenant, regex))
        try:
            error = await asyncio.shield(self._answer(regex))
        except asyncio.CancelledError:
            self.given_up.append(regex)
            raise
        if error is not None:
            raise error
        self._fine.add((tenant, wanted))

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Keeps what it is given; what is asked runs at once."""

    seconds_since_progress = 1.5

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.left: list[Any] = []

    def submit(self, route: Any, commands: Sequence[Any]) -> None:
        self.got += commands

    def leave(self, route: Any) -> None:
        self.left.append(route)

    def ask(self, question: Callable[[], None]) -> None:
        question()


class Case:
    def __init__(self, has_grammars: bool = True) -> None:
        self.engine, self.checks = FakeEngine(), FakeChecks()
        self.grammars = grammars()
        known = self.grammars if has_grammars else None
        self.guard = StructureGuard(self.engine, self.checks, known)  # type: ignore[arg-type]

    def submit(self, *commands: Any, route: Any = len) -> None:
        self.guard.submit(route, commands)

    async def until_got(self, count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(self.engine.got) < count:  # noqa: ASYNC110 - of the code under test
                await asyncio.sleep(0)
        return self.engine.got


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    made = Case()
    yield made
    made.guard.close()


async def test_other_sequences_go_on_during_a_check(case: Case) -> None:
    case.submit(opening("x", "a+"), verify("x"))
    for number in range(1, 101):
        case.submit(verify("y", number), verify("x", number + 1) if number < 5 else verify("z", number))
        await asyncio.sleep(0)
    rounds = [command for command in case.engine.got if command.sequence_id == "y"]
    assert len(rounds) == 100
    assert "x" not in {command.sequence_id for command in case.engine.got}
    case.checks.answer("a+")
    got = await case.until_got(196 + 6)
    assert got[-6:] == [opening("x", "a+"), verify("x"), *[verify("x", n) for n in range(2, 6)]]


async def test_a_structure_is_compiled_beside_the_engine(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, right = [], compiler.Grammars._compile

    def noting(self: Grammars, wanted: StructuredOutputs, tokenizer: Any) -> Any:
        threads.append(threading.current_thread())
        return right(self, wanted, tokenizer)

    monkeypatch.setattr(compiler.Grammars, "_compile", noting)
    case.submit(opening("x", "a+", salt="s"))
    case.checks.answer("a+")
    await case.until_got(1)
    assert case.grammars.holds(StructuredOutputs(regex="a+"), "s")
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_refused_structure_fails_its_sequence(case: Case) -> None:
    case.checks.answer("a+", REFUSED)
    case.submit(opening("x", "a+"), verify("x"))
    got = await case.until_got(2)
    assert got == [SequenceFailed("x", 1, 0, REFUSED), verify("x")]
    assert not case.grammars.holds(StructuredOutputs(regex="a+"))


async def test_a_known_structure_passes_at_once(case: Case) -> None:
    case.checks.answer("a+")
    case.submit(opening("x", "a+"))
    await case.until_got(1)
    case.submit(opening("y", "a+"), verify("y"))
    assert case.engine.got[1:] == [opening("y", "a+"), verify("y")]
    assert len(case.checks.asked) == 1
    case.submit(opening("z", "a+", salt="other"))
    await case.until_got(4)
    assert case.checks.asked == [("", "a+"), ("other", "a+")], (
        "another tenant's must not be told by its speed"
    )


async def test_sequences_without_structure_pass_at_once(case: Case) -> None:
    case.submit(opening("x"), verify("x"), CloseSequence("x", 1))
    assert len(case.engine.got) == 3


async def test_a_worker_without_a_tokenizer_refuses_itself() -> None:
    case = Case(has_grammars=False)
    case.submit(opening("x", "a"))
    assert case.engine.got == [opening("x", "a")]


async def test_closing_a_sequence_abandons_its_check(case: Case) -> None:
    case.submit(opening("x", "a+", epoch=2), verify("x"))
    await asyncio.sleep(0)
    case.submit(CloseSequence("x", 1))
    assert case.engine.got == []
    case.submit(CloseSequence("x", 2))
    assert case.engine.got == [CloseSequence("x", 2)]
    await asyncio.sleep(0)
    assert case.checks.given_up == ["a+"]


async def test_an_ending_stream_abandons_its_checks(case: Case) -> None:
    case.submit(opening("x", "a+"), route=len)
    case.submit(opening("x", "b+"), route=sum)
    await asyncio.sleep(0)
    case.guard.leave(len)
    await asyncio.sleep(0)
    assert (case.checks.given_up, case.engine.left) == (["a+"], [len])
    case.checks.answer("b+")
    assert await case.until_got(1) == [opening("x", "b+")]


async def test_a_newer_epoch_waits_behind_the_older(case: Case) -> None:
    case.submit(opening("x", "a+"), opening("x", "b+", epoch=2), verify("x"))
    case.checks.answer("a+", REFUSED)
    await case.until_got(1)
    case.checks.answer("b+")
    got = await case.until_got(3)
    assert got == [SequenceFailed("x", 1, 0, REFUSED), opening("x", "b+", epoch=2), verify("x")]


async def test_held_commands_are_bounded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RUNNING_SEQUENCES", 1)
    monkeypatch.setattr(structures_module, "_MAX_COMMANDS", 2)
    case.submit(opening("x", "a+"), opening("y", "b+"), *[verify("x", n) for n in range(1, 4)])
    refused = case.engine.got
    assert [(each.sequence_id, each.round) for each in refused] == [("y", 0), ("x", 3)]
    assert all(isinstance(each.error, ResourceExhaustedError) for each in refused)


async def test_an_unparsable_command_is_refused_at_once(case: Case) -> None:
    failed = SequenceFailed("x", 1, 1, REFUSED)
    case.submit(opening("x", "a+"), failed)
    assert case.engine.got == [failed]


async def test_closing_ends_running_checks(case: Case) -> None:
    case.submit(opening("x", "a+"))
    await asyncio.sleep(0)
    case.guard.close()
    await asyncio.sleep(0)
    assert (case.checks.closed, case.checks.given_up) == (True, ["a+"])
    assert case.guard.seconds_since_progress == 1.5
