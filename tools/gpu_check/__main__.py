"""`python -m tools.gpu_check`: arguments, and the order of the checks."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tools.gpu_check.report import Figures
    from tools.gpu_check.running import Bench

_NEEDED: Final = {
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "numba": "numba",
    "llguidance": "llguidance",
    "google.protobuf": "protobuf",
    "grpc_status": "grpcio-status",
}
"""Modules and the packages that have them: what the workers' engines import."""
_VERSIONS: Final = ("torch", "transformers", "triton", "numpy")
_MINUTES: Final = {False: 8.0, True: 15.0}
"""Time limit, by whether the device is pretended."""
_STRETCH: Final = 4.0
"""Factor of the checks' time limits on the pretended device, whose two processors do the work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks. 0 if no row failed, 1 if some did, 2 if nothing can run."""
    asked = _parser().parse_args(arguments)
    lacking = [package for module, package in _NEEDED.items() if not _found(module)]
    if lacking:
        print(f"error: missing packages: {', '.join(lacking)}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    from tools.gpu_check.checks import CHECKS

    if asked.list:
        print("\n".join(f"{check.name}: {check.about}" for check in CHECKS))
        return 0
    known = [check.name for check in CHECKS]
    if unknown := set(asked.only) - set(known):
        print(f"error: --only: {', '.join(sorted(unknown))}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    from tools.gpu_check.device import opened
    from tools.gpu_check.report import Report
    from tools.gpu_check.running import Bench, Run
    from tools.gpu_check.sizes import CARD, PRETENDED

    try:
        with opened(pretend=asked.pretend) as device:
            bench = Bench(device, PRETENDED if asked.pretend else CARD)
            if asked.child:
                _work_as_child(bench, asked.child)
                return 0
            report = Report(_machine(device.pretended), device.pretended)
            minutes = asked.minutes or _MINUTES[asked.pretend]
            chosen = [check for check in CHECKS if not asked.only or check.name in asked.only]
            Run(report, asked.out, minutes, _STRETCH if asked.pretend else 1.0).run(chosen, bench)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{report.table()}\nwritten to {asked.out}")
    return 1 if report.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "gpu_check", description="Checks and times this project on a CUDA device."
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="folder of the report")
    parser.add_argument(
        "--minutes", type=float, help="time limit of all checks together: 8, or 15 with --pretend"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="run this check; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument(
        "--pretend",
        action="store_true",
        help="small shapes on the pretended device of the tests: no card's figures",
    )
    parser.add_argument("--child", nargs="+", default=[], help=argparse.SUPPRESS)
    return parser


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _work_as_child(bench: Bench, words: Sequence[str]) -> None:
    from tools.gpu_check.checks import faults, sharing

    match words:
        case ["fault", name]:
            print(json.dumps(faults.cause(bench.device, bench.sizes, name)), flush=True)
        case ["steps"]:
            sharing.serve_steps(bench.device, bench.sizes)
        case _:
            raise RuntimeError(f"--child: {' '.join(words)}")


def _machine(pretended: bool) -> Figures:
    import torch

    told: dict[str, Any] = {"device": "pretended"}
    if not pretended:
        at = torch.cuda.get_device_properties(torch.cuda.current_device())
        told = {
            "device": at.name,
            "capability": f"{at.major}.{at.minor}",
            "memory_GiB": round(at.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    return told | {"python": platform.python_version()} | {name: _version(name) for name in _VERSIONS}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())
