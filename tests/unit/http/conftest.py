"""A coordinator with scripted requests and the embedded pair's real tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.auth import Gate, Group
from coordinator.sequence.ledger import Commit
from coordinator.sequence.stats import SpeculationStats
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.tenants import TenantMetrics
from coordinator.text.long_texts import LongTexts
from coordinator.text.vocabulary import Vocabulary
from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.types import AcceptanceMode, FinishReason, SequenceParams
from paceline.rpc.codec import GenerateCall, check_against_model
from paceline.v1 import common_pb2
from tests.unit.http.api import MAX_MODEL_LEN, Api, Exchange, Script, commit


async def hello(call: GenerateCall) -> AsyncIterator[Commit]:
    """Two tokens for each choice, the choices in turns."""
    for choice in range(call.sampling.n):
        yield commit(0, f"hello{choice}", choice=choice)
    for choice in range(call.sampling.n):
        yield commit(1, " world", FinishReason.LENGTH, choice)


@dataclass
class ScriptedCoordinator:
    """What the HTTP face asks of a coordinator."""

    vocabulary: Vocabulary
    script: Script = hello
    found: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while a target is there, or was."""
    accepting: bool = True
    serving: bool = True
    draining: bool = False
    refusal: PacelineError | None = None
    calls: list[GenerateCall] = field(default_factory=list)
    running: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    tenants: TenantMetrics | None = None
    certificates: Any = field(default_factory=lambda: SimpleNamespace(days_left=dict))
    gate: Gate = field(default_factory=Gate)
    links: tuple[Any, ...] = ()
    taken: int = 0
    """Times that a client has taken a piece of an answer."""
    config: Any = field(default_factory=lambda: SimpleNamespace(model_name="", max_num_speculative_tokens=8))
    dispatcher: Any = field(
        default_factory=lambda: SimpleNamespace(
            running=1, waiting=2, finished=3, failed=4, check_fits=lambda n: None
        )
    )

    def __post_init__(self) -> None:
        self.found.set()

    @property
    def model_name(self) -> str:
        self.target_info()
        return "a/model"

    @property
    def known_name(self) -> str:
        try:
            return self.model_name
        except UnavailableError:
            return ""

    @property
    def has_target(self) -> bool:
        return self.found.is_set()

    async def wait_for_target(self) -> None:
        await self.found.wait()

    def target_info(self) -> Any:
        if not self.found.is_set():
            raise UnavailableError("no target worker is available yet")
        return common_pb2.WorkerInfo(
            model="files/of/the/target", max_model_len=MAX_MODEL_LEN, vocabulary_size=self.vocabulary.size
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        texts = LongTexts(self.vocabulary)
        return await texts.encode("text", text, MAX_MODEL_LEN, add_special_tokens=add_special_tokens)

    def check_length(self, name: str, characters: int) -> None:
        LongTexts(self.vocabulary).check_length(name, characters, MAX_MODEL_LEN)

    async def detokenize(self, token_ids: Any) -> str:
        return self.vocabulary.decode(token_ids)

    @contextlib.asynccontextmanager
    async def generating(self, call: GenerateCall, *, group: Group) -> AsyncIterator[Any]:
        self.calls.append(call)
        if self.refusal is not None:
            raise self.refusal
        prompt = await self.tokenize(call.prompt) if isinstance(call.prompt, str) else list(call.prompt)
        check_against_model(call, len(prompt), self.vocabulary.size, MAX_MODEL_LEN)
        ledger = SimpleNamespace(num_generated=2)
        state = SimpleNamespace(
            ledger=ledger, stats=SpeculationStats(), planner=SimpleNamespace(num_speculative_tokens=4)
        )
        self.running += 1
        try:
            yield SimpleNamespace(
                call=call,
                prompt=prompt,
                params=SequenceParams(call.sampling.of_choice(0), AcceptanceMode.COUPLED, len(prompt)),
                choices=range(call.sampling.n),
                machines=[SimpleNamespace(state=state)] * call.sampling.n,
            )
        finally:
            self.running -= 1

    async def parts(self, generation: Any) -> AsyncIterator[Commit]:
        async for part in self.script(generation.call):
            yield part

    def took(self, generations: Any) -> None:
        self.taken += 1


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.load("embedded:target")


@pytest.fixture
def coordinator(vocabulary: Vocabulary) -> ScriptedCoordinator:
    return ScriptedCoordinator(vocabulary)


@pytest.fixture
async def api(coordinator: ScriptedCoordinator) -> AsyncIterator[Api]:
    async with Api(coordinator) as made:
        yield made


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()
