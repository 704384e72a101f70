"""Checks of tenants' structures: in turns, joined, abandoned, remembered by tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.errors import (
    InternalError,
    InvalidArgumentError,
    PacelineError,
    ResourceExhaustedError,
    UnavailableError,
)
from paceline.core.structured import StructuredOutputs
from paceline.grammar.checks import StructureChecks
from paceline.grammar.process import StructureVocabulary

MODEL = StructureVocabulary(9, (0,))


def named(name: str) -> StructuredOutputs:
    return StructuredOutputs(regex=name)


class FakeProcess:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.given_up: list[str] = []
        self.closed = False
        self._answers: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        self.in_progress = 0

    def answer(self, answer: dict[str, Any] | Exception = {"kept": True}, times: int = 1) -> None:  # noqa: B006
        for _ in range(times):
            self._answers.put_nowait(answer)

    async def check(self, model: StructureVocabulary, wanted: StructuredOutputs) -> dict[str, Any]:
        name = str(wanted.regex)
        self.asked.append(name)
        self.in_progress += 1
        assert self.in_progress == 1
        try:
            answer = await self._answers.get()
        except asyncio.CancelledError:
            self.given_up.append(name)
            raise
        finally:
            self.in_progress -= 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def follow(
        self, model: StructureVocabulary, wanted: StructuredOutputs, texts: Any
    ) -> dict[str, Any]:
        return await self.check(model, wanted)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
async def process() -> FakeProcess:
    return FakeProcess()


@pytest.fixture
async def checks(process: FakeProcess) -> Any:
    made = StructureChecks(process)  # type: ignore[arg-type]
    yield made
    made.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of the code under test
            await asyncio.sleep(0)


def begun(checks: StructureChecks, tenant: str, *names: str) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(checks.check(tenant, MODEL, named(name))) for name in names]


async def test_tenants_checks_take_turns(checks: StructureChecks, process: FakeProcess) -> None:
    tasks = begun(checks, "a", "a1", "a2", "a3", "a4") + begun(checks, "b", "b1", "b2")
    process.answer(times=6)
    await asyncio.gather(*tasks)
    assert process.asked == ["a1", "a2", "b1", "a3", "b2", "a4"] or process.asked == [
        "a1", "b1", "a2", "b2", "a3", "a4",
    ]  # fmt: skip


async def test_results_are_remembered_by_tenant(checks: StructureChecks, process: FakeProcess) -> None:
    process.answer(times=2)
    for _ in range(3):
        await checks.check("a", MODEL, named("x"))
    assert process.asked == ["x"]
    await checks.check("b", MODEL, named("x"))
    assert process.asked == ["x", "x"], "b must not see by an answer at once that a asked for it"
    assert checks.passed("a", MODEL, named("x"))
    assert not checks.passed("c", MODEL, named("x"))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"over": "time"}, "structured_outputs.regex: takes too long to compile"),
        ({"over": "memory"}, "structured_outputs.regex: takes too much memory to compile"),
        ({"field": "structured_outputs", "reason": "no"}, "structured_outputs: no"),
        ({"broken": "PanicException"}, r"structured_outputs.regex: .* failed \(PanicException\)"),
    ],
)
async def test_a_refusal_is_remembered_and_raised_anew(
    checks: StructureChecks, process: FakeProcess, answer: dict[str, Any], message: str
) -> None:
    process.answer(answer)
    raised = []
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            await checks.check("a", MODEL, named("x"))
        raised.append(caught.value)
    assert process.asked == ["x"]
    assert raised[0] is not raised[1]
    assert not checks.passed("a", MODEL, named("x"))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"killed": True}, UnavailableError),
        (UnavailableError("none"), UnavailableError),
        (ValueError("x"), InternalError),
    ],
)
async def test_a_failure_not_of_the_structure_is_retried(
    checks: StructureChecks, process: FakeProcess, answer: Any, kind: type[PacelineError]
) -> None:
    process.answer(answer)
    process.answer()
    with pytest.raises(kind):
        await checks.check("a", MODEL, named("x"))
    await checks.check("a", MODEL, named("x"))
    assert process.asked == ["x", "x"]


async def test_equal_checks_of_a_tenant_are_compiled_once(
    checks: StructureChecks, process: FakeProcess
) -> None:
    tasks = begun(checks, "a", *["x"] * 100)
    process.answer()
    await asyncio.gather(*tasks)
    assert process.asked == ["x"]


async def test_checks_of_absent_callers_are_not_compiled(
    checks: StructureChecks, process: FakeProcess
) -> None:
    running, waiting, stays = begun(checks, "a", "running", "waiting", "stays")
    await until(lambda: process.asked)
    for task in (waiting, running):
        task.cancel()
    await asyncio.wait((waiting, running))
    process.answer()
    await stays
    assert process.asked == ["running", "stays"]
    assert process.given_up == ["running"]
    process.answer()
    await checks.check("a", MODEL, named("running"))
    assert process.asked[-1] == "running"


async def test_a_check_goes_on_while_one_caller_waits(checks: StructureChecks, process: FakeProcess) -> None:
    first, second = begun(checks, "a", "x", "x")
    await until(lambda: process.asked)
    first.cancel()
    await asyncio.wait((first,))
    process.answer()
    await second
    assert (process.asked, process.given_up) == (["x"], [])


async def test_the_queues_of_each_tenant_and_all_are_bounded(
    checks: StructureChecks, process: FakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TENANT_STRUCTURE_CHECKS", 2)
    monkeypatch.setattr(limits, "MAX_STRUCTURE_CHECKS", 3)
    tasks = begun(checks, "a", "a1")
    await until(lambda: process.asked)
    tasks += begun(checks, "a", "a2", "a3")
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError, match="of your requests") as caught:
        await checks.check("a", MODEL, named("a4"))
    assert caught.value.retry_after
    tasks += begun(checks, "b", "b1")
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError):
        await checks.check("c", MODEL, named("c1"))
    follows = asyncio.create_task(checks.follows("a", MODEL, named("a1"), [[1]]))
    process.answer(times=6)
    await asyncio.gather(*tasks)
    assert await follows, "who comes back is not sent away for those that wait"


async def test_following_and_compiling_take_turns(checks: StructureChecks, process: FakeProcess) -> None:
    follows = [asyncio.create_task(checks.follows("a", MODEL, named("f"), [[1]])) for _ in range(3)]
    tasks = begun(checks, "b", "b1", "b2")
    process.answer(times=5)
    await asyncio.gather(*follows, *tasks)
    assert process.asked in (["f", "b1", "f", "b2", "f"], ["b1", "f", "b2", "f", "f"])


async def test_a_text_breaking_the_structure_is_reported(
    checks: StructureChecks, process: FakeProcess
) -> None:
    process.answer({"kept": False})
    assert not await checks.follows("a", MODEL, named("x"), [[1]])
    process.answer({"over": "time"})
    with pytest.raises(InvalidArgumentError, match="takes too long to follow"):
        await checks.follows("a", MODEL, named("x"), [[1]])


async def test_closing_ends_the_process_and_all_waiting_checks(
    checks: StructureChecks, process: FakeProcess
) -> None:
    tasks = begun(checks, "a", "running", "waiting")
    await until(lambda: process.asked)
    checks.close()
    assert process.closed
    for task in tasks:
        with pytest.raises(UnavailableError, match="stopping"):
            await task
    with pytest.raises(UnavailableError, match="stopping"):
        await checks.check("a", MODEL, named("later"))
    with pytest.raises(UnavailableError, match="stopping"):
        await checks.follows("a", MODEL, named("later"), [[1]])
    assert process.asked == ["running"]
