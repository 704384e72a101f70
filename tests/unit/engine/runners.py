"""Runners on one backend by name, recorded or not."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.captured import CapturedBackend, Recorder
from paceline.engine.backends.interface import Backend, ServedModel
from paceline.engine.backends.registry import BACKENDS
from paceline.engine.cache import PagedCache
from paceline.engine.runner import ModelRunner, max_length_of, output_width


def backend_of(
    model: Any, cache: PagedCache, name: str = "torch", attention: CacheAttention = GATHERED
) -> Backend:
    """The backend of this name, which serves the model."""
    positions, width = max_length_of(model.config), output_width(model)
    backend = BACKENDS[name](ServedModel(model, cache.layers, positions, width, attention=attention))
    assert backend is not None
    return backend


def runner_of(
    model: Any, cache: PagedCache, name: str = "torch", attention: CacheAttention = GATHERED
) -> ModelRunner:
    """A runner on that backend."""
    return ModelRunner(model, cache, backend_of(model, cache, name, attention))


def recording_runner(
    model: Any,
    cache: PagedCache,
    recorder: Recorder,
    name: str = "torch",
    room: Tensor | None = None,
    attention: CacheAttention = GATHERED,
) -> ModelRunner:
    """A runner on that backend, recorded."""
    backend = backend_of(model, cache, name, attention)
    assert backend.recordable is not None
    limits = {"max_model_len": max_length_of(model.config), "vocab_size": output_width(model)}
    captured = CapturedBackend(backend, backend.recordable, cache, recorder, room=room, **limits)
    return ModelRunner(model, cache, captured)


def captured_of(runner: ModelRunner) -> CapturedBackend:
    """The recordings of a runner that has some."""
    assert isinstance(runner.backend, CapturedBackend)
    return runner.backend
