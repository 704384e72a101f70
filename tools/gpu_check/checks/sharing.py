"""Two processes on one device: what one costs the other."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from paceline.engine.layout import SequenceInput
from tools.gpu_check import children
from tools.gpu_check.device import Device
from tools.gpu_check.models import new_model, runners_of, tables_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import Sizes

_COUNT = 4
_READY, _GO = "ready", "go"


def _cases(bench: Bench) -> Iterator[Case]:
    yield "two models, one after the other and at once", lambda: _measured(bench)


def _measured(bench: Bench) -> Figures:
    wait = 60.0 * CHECK.minutes
    with children.started(bench.device, "steps") as one, children.started(bench.device, "steps") as other:
        for child in (one, other):
            if (line := child.line(wait)) != _READY:
                raise Failed(f"a process did not become ready: {line}")
        alone = [_rate(child, wait) for child in (one, other)]
        for child in (one, other):
            child.send(_GO)
        together = [_result(child, wait) for child in (one, other)]
    figures = {
        "alone_steps_per_second": [round(rate, 1) for rate in alone],
        "together_steps_per_second": [round(rate, 1) for rate in together],
        "slowest_of_alone": min(a / b for a, b in zip(together, alone, strict=True)),
        "sum_of_alone": sum(a / b for a, b in zip(together, alone, strict=True)),
    }
    if min(together) <= 0:
        raise Failed("a process made no step beside the other", figures)
    return figures


def _rate(child: children.Child, wait: float) -> float:
    child.send(_GO)
    return _result(child, wait)


def _result(child: children.Child, wait: float) -> float:
    line = child.line(wait)
    try:
        return float(json.loads(line)["steps_per_second"])
    except (ValueError, KeyError):
        raise Failed(f"a process ended: {line}") from None


def serve_steps(device: Device, sizes: Sizes) -> None:
    """Make recorded steps for a while each time that a line asks for it; the child's side."""
    keys = min(sizes.keys)
    runners = runners_of(device, new_model(device, sizes.small, sizes.dtype), _COUNT * (keys + 64), share=0.2)
    tables = tables_of(runners.launched, _COUNT, keys, 1)
    runner = runners.recording(device.new_recorder()).runner

    def step() -> None:
        runner.forward([SequenceInput(table, [5], 1) for table in tables])
        for table in tables:
            table.truncate_to(keys)

    for _ in range(3):
        device.seconds(step, 1)
    print(_READY, flush=True)
    for _ in sys.stdin:
        begun, steps = time.perf_counter(), 0
        while (spent := time.perf_counter() - begun) < sizes.seconds_beside:
            device.seconds(step, 4)
            steps += 4
        print(json.dumps({"steps_per_second": steps / spent}), flush=True)


CHECK = Check("sharing", "two processes on one device", _cases, minutes=1.5)
