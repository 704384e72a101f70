"""A load test from the first request to the report."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from paceline.client import AsyncClient
from paceline.client.server_status import Model
from paceline.core.errors import CancelledError, InvalidArgumentError, UnavailableError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest.config import LoadConfig, check_request
from paceline.loadtest.plan import LoadPlan, check_lengths
from paceline.loadtest.prompts import Prompts
from paceline.loadtest.report import Report
from paceline.loadtest.running import Load
from paceline.loadtest.verifying import VerifyReport, chosen, compared, without_draft

_MODELS_SECONDS = 10.0


class LoadTest:
    """One test of one server. It can be stopped at any time and then reports the results so far."""

    def __init__(
        self,
        client: AsyncClient,
        config: LoadConfig,
        prompts: Prompts,
        sampling: SamplingParams,
        speculation: SpeculationParams,
        progress: Callable[[str], None],
    ) -> None:
        """Raises InvalidArgumentError naming an unsupported or invalid parameter."""
        check_request(config, sampling, speculation.mode)
        check_lengths(config, prompts, sampling)
        self._client = client
        self._config = config
        self._prompts = prompts
        self._sampling = sampling
        self._speculation = speculation
        self._progress = progress
        self._name = secrets.token_hex(6)
        self._stopped = asyncio.Event()
        self._cutting: asyncio.Task[None] | None = None

    @property
    def stopped(self) -> bool:
        """True after `stop` or `cut`."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Start no more requests; wait for the running ones."""
        self._stopped.set()

    def cut(self) -> None:
        """Start no more requests; running ones fail immediately."""
        self.stop()
        self._cutting = self._cutting or asyncio.create_task(self._client.close())

    async def run(self) -> Report:
        """Warm up, send the load, then verify.

        Errors of the load's requests are in the report. Raises PacelineError for errors before the load.
        """
        config = self._config
        model = await self._model()
        plan = LoadPlan(config, self._prompts, self._sampling, model.vocabulary_size)
        await self._warm_up(plan)
        begun = datetime.now(UTC)
        load, cpu = self._load("load", self._speculation), time.process_time()
        if config.rate is None:
            assert config.places is not None
            await load.closed(plan, config.places, config.duration)
        else:
            await load.open(plan, config.places, config.duration)
        cpu = time.process_time() - cpu
        if not load.outcomes:
            if self.stopped:
                raise CancelledError("stopped before anything was sent")
            raise InvalidArgumentError("duration", "is too short: no request was due at this rate")
        ended = max(outcome.ended for outcome in load.outcomes)
        seconds = max(ended, self._arrivals_seconds(load))
        verification = await self._verify(load, plan) if config.verify else None
        return Report(
            address=self._client.address,
            model=model,
            config=config,
            sampling=self._sampling,
            speculation=self._speculation,
            begun=begun,
            outcomes=load.outcomes,
            unsent=load.unsent,
            stopped=self.stopped,
            seconds=seconds,
            client_cpu=cpu / ended,
            verification=verification,
        )

    def _arrivals_seconds(self, load: Load) -> float:
        """The duration if it ended an open loop, else 0. Rates then cover the whole duration, including the
        time after the last arrival."""
        config = self._config
        asked = len(load.outcomes) + load.unsent
        ended_otherwise = self.stopped or asked == config.most_requests
        if config.rate is None or config.duration is None or ended_otherwise:
            return 0.0
        return config.duration

    async def _model(self) -> Model:
        models = await self._client.models(timeout=self._config.timeout or _MODELS_SECONDS)
        if not models:
            raise UnavailableError("the server offers no model")
        return models[0]

    async def _warm_up(self, plan: LoadPlan) -> None:
        warming = self._load("warming up", self._speculation)
        for number in range(self._config.warm_up):
            if self.stopped:
                return
            outcome = await warming.send(plan.ask(number))
            if outcome.error:
                raise outcome.error
            assert outcome.answer is not None
            check_request(self._config, self._sampling, outcome.answer.acceptance)

    async def _verify(self, load: Load, plan: LoadPlan) -> VerifyReport:
        again = self._load("asking again", without_draft(self._speculation))
        first = chosen(load.outcomes, self._config.verify)
        await again.closed((plan.ask(outcome.number) for outcome in first), 1, None)
        return compared(first, again.outcomes)

    def _load(self, part: str, speculation: SpeculationParams) -> Load:
        return Load(
            self._client,
            speculation,
            cache_salt=partial(self._salt, part),
            timeout=self._config.timeout,
            keep_tokens=self._config.verify > 0,
            stopped=self._stopped,
            progress=partial(self._tell, part),
        )

    def _salt(self, part: str, number: int) -> str:
        """The request's cache salt: unique for cold prompts, else shared."""
        return f"{self._name}-{part}-{number}" if self._config.are_cold else ""

    def _tell(self, part: str, load: Load) -> None:
        self._progress(
            f"{part}: {len(load.outcomes)} ended, {load.failed} of them failed, {load.running} running"
        )
