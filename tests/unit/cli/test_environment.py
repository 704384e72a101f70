"""Variables that must be set before gRPC is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli.environment import GRPC_EXPERIMENTS, prepare


def test_an_existing_variable_is_kept() -> None:
    environment = {"GRPC_EXPERIMENTS": "mine"}
    prepare(environment)
    assert environment == {"GRPC_EXPERIMENTS": "mine"}


def test_a_missing_variable_is_set() -> None:
    environment: dict[str, str] = {}
    prepare(environment)
    assert environment == {"GRPC_EXPERIMENTS": GRPC_EXPERIMENTS}


@pytest.mark.slow
def test_variables_are_set_before_grpc_is_loaded() -> None:
    """An audit hook sees every import, the command's own ones in their order."""
    script = """
import os, sys
seen = []
def hook(event, arguments):
    if event == "import" and arguments[0] == "grpc":
        seen.append(os.environ.get("GRPC_EXPERIMENTS"))
os.environ.pop("GRPC_EXPERIMENTS", None)
sys.addaudithook(hook)
import paceline.cli
print(seen[0])
"""
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == GRPC_EXPERIMENTS


@pytest.mark.slow
def test_the_pinned_grpc_knows_the_experiments() -> None:
    """gRPC complains on standard error of an unknown experiment."""
    script = "import paceline.cli, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "experiment" not in printed.stderr.lower()
