"""The target worker's process: wiring of its parts."""

from __future__ import annotations

from paceline.core.config import TargetConfig
from paceline.engine.loading.build import Built, build
from paceline.engine.scheduling.mask import grammars_of
from paceline.telemetry.worker import WorkerObserver
from paceline.worker_process import Role
from paceline.worker_process import run as run_worker
from target_worker.engine import TargetEngine
from target_worker.largest import judge_largest
from target_worker.service import FRAME_CODEC, register
from target_worker.verify import warm_up


def _load(config: TargetConfig) -> Built:
    return build(config, judge_largest)


def _make_engine(built: Built, config: TargetConfig, observer: WorkerObserver) -> TargetEngine:
    assert built.runner is not None
    warm_up(built.runner.device)
    return TargetEngine(
        built.runner,
        config,
        vocabulary_size=built.loaded.vocab_size,
        max_model_len=built.max_model_len,
        eos_token_ids=sorted(built.loaded.eos_token_ids),
        grammars=grammars_of(built.loaded),
        observer=observer,
    )


ROLE = Role("target", "verify", "paceline.v1.TargetService", _load, _make_engine, register, FRAME_CODEC)


def run(config: TargetConfig) -> None:
    """Serve until told to stop."""
    run_worker(ROLE, config)
