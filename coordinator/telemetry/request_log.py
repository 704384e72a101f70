"""Notifies observers of each request's start and end, and logs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coordinator.auth import principal
from coordinator.requests.observer import Observer, RequestRecord
from coordinator.scheduling.observer import tell_all
from coordinator.telemetry import call_log
from paceline.core.clock import Clock
from paceline.core.errors import CancelledError, InternalError, PacelineError

if TYPE_CHECKING:
    from coordinator.requests.generation import Generation
    from paceline.rpc.codec import GenerateCall


class Reporting:
    """Notifies observers when requests begin and end."""

    def __init__(self, observers: Sequence[Observer], clock: Clock) -> None:
        self._observers = observers
        self._clock = clock

    @contextlib.contextmanager
    def observed(self, call: GenerateCall, model: str) -> Iterator[RequestRecord]:
        """Record a request that runs while the block lasts."""
        of = call_log.current.get()
        operation = call_log.COMPLETION if of is None else of.operation
        request = RequestRecord(call, model, self._clock(), operation, tenant=principal.get().name)
        tell_all(self._observers, lambda observer: observer.request_began(request))
        try:
            yield request
        except PacelineError as error:
            request.error = error
            call_log.refused(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if not _is_whole(request):
                request.error = CancelledError("the client went away")
            raise
        except Exception:
            request.error = InternalError("a defect")
            raise
        finally:
            request.ended = self._clock()
            tell_all(self._observers, lambda observer: observer.request_ended(request))
            if of is not None:
                if request.request_id:
                    of.name(request.request_id)
                of.requests.append(request)

    def taken_on(self, request: RequestRecord, generation: Generation) -> None:
        """The request was accepted, and its sequences run or wait."""
        request.generation = generation
        for running in generation.choices:
            # A resumed request arrived with its first call.
            running.arrived_at = min(running.arrived_at, request.began)
        if (of := call_log.current.get()) is not None:
            of.name(request.request_id)


def _is_whole(request: RequestRecord) -> bool:
    """True if nothing is left to generate, so the client left with the whole answer."""
    generation = request.generation
    return generation is not None and all(machine.state.ledger.ended for machine in generation.machines)
