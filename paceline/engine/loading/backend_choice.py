"""Chooses a model's backend: the most specific one of the registry whose logits are right."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.captured import PATIENCE, CapturedBackend, Recorder
from paceline.engine.backends.interface import Backend, ServedModel
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.loading.self_check import error_on_paged_cache, small_cache
from paceline.engine.runner import max_length_of, output_width
from paceline.telemetry.steps import step

log = logging.getLogger(__name__)


def choose_backend(
    served: ServedModel, names: Iterable[str], expected: list[Tensor], *, may_gather: bool = True
) -> Backend:
    """The last one of the registry among `names` that serves the model with the right logits.

    If there is none with attention in place and `may_gather`, attention is gathered. `expected` are
    `logits_of_transformers`. Raises InvalidArgumentError naming `model` if there is none.
    """
    names = list(names)
    try:
        return _choose(served, names, expected)
    except InvalidArgumentError as error:
        if not (served.attention.in_place and may_gather):
            raise
        log.warning("attention reads copies of the cache: with attention in place, %s", error.message)
    return _choose(replace(served, attention=GATHERED), names, expected)


def _choose(served: ServedModel, names: Iterable[str], expected: list[Tensor]) -> Backend:
    kind, allowed = type(served.model).__name__, set(names)
    error = "is served by no backend"
    for name in reversed([name for name in BACKENDS if name in allowed]):
        backend = BACKENDS[name](served)
        if backend is None:
            continue
        wrong = _error(served, backend, expected)
        if wrong is None and backend.pack():
            wrong = _error(served, backend, expected)
            if wrong is not None:
                # The model has released its weights, so no other backend can serve it.
                raise InvalidArgumentError("model", f"{kind} {wrong}")
        if wrong is None:
            return backend
        log.warning("%s is not served by the backend %s: it %s", kind, name, wrong)
        error = wrong
    raise InvalidArgumentError("model", f"{kind} {error}")


def recorded_backend(
    served: ServedModel,
    backend: Backend,
    cache: PagedCache,
    expected: list[Tensor],
    new_recorder: Callable[[], Recorder],
    room: Tensor,
    max_model_len: int,
) -> Backend:
    """`backend` with its passes over `cache` recorded, starting with those of one short sequence.

    Returns `backend` itself if it has nothing to record, or if recorded passes give other logits. `room`
    receives the logits of recorded passes.
    """
    recordable = backend.recordable
    if recordable is None:
        return backend
    step("recording passes of common shapes; this takes some seconds")
    model = served.model
    tried = small_cache(model, served.layers, recordable.attention.smallest_block)
    trial = CapturedBackend(
        backend,
        recordable,
        tried,
        new_recorder(),
        max_model_len=max_length_of(model.config),
        vocab_size=output_width(model),
        room=room,
    )
    error = error_on_paged_cache(model, tried, trial, expected, fed_before=1 + PATIENCE)
    if not trial.usable:
        error = "cannot be made"
    # The trial's recordings are freed before anything else is recorded.
    del trial
    if error is not None:
        log.warning("passes of %s are not recorded: a recorded one %s", type(model).__name__, error)
        return backend
    captured = CapturedBackend(
        backend,
        recordable,
        cache,
        new_recorder(),
        max_model_len=max_model_len,
        vocab_size=served.vocab_size,
        room=room,
    )
    captured.warm_up()
    return captured


def _error(served: ServedModel, backend: Backend, expected: list[Tensor]) -> str | None:
    cache = small_cache(served.model, served.layers, served.attention.smallest_block)
    return error_on_paged_cache(served.model, cache, backend, expected)
