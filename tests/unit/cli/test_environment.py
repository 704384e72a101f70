"""Variables set before gRPC is loaded, and those that Kubernetes sets for Services of our names."""

from __future__ import annotations

import pytest
from harness.commands import command, python

from paceline.cli.environment import GRPC_EXPERIMENTS, prepare

LINK = "tcp://10.96.1.2:50151"
PORTS = ["PORT", "HTTP_PORT", "TARGET_PORT", "DRAFT_PORT", "METRICS_PORT"]
SERVE = "import sys; sys.argv[1:] = 'serve', '--start-timeout', '0'; from paceline.cli import main; main()"
"""Refused once all options have been read, before anything is started."""


@pytest.mark.parametrize(
    ("given", "left"), [({}, GRPC_EXPERIMENTS), ({"GRPC_EXPERIMENTS": "mine"}, "mine")], ids=["none", "set"]
)
def test_a_missing_variable_is_set(given: dict[str, str], left: str) -> None:
    prepare(given)
    assert given == {"GRPC_EXPERIMENTS": left}


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
    assert python(script).stdout.strip() == GRPC_EXPERIMENTS


@pytest.mark.slow
def test_the_pinned_grpc_knows_the_experiments() -> None:
    """gRPC complains on standard error of an unknown experiment."""
    done = python("import paceline.cli, grpc; grpc.insecure_channel('127.0.0.1:1').close()")
    assert done.returncode == 0
    assert "experiment" not in done.stderr.lower()


@pytest.mark.slow
def test_service_links_are_not_ports() -> None:
    """Kubernetes sets PACELINE_PORT for a Service named `paceline`."""
    ended = python(SERVE, **{f"PACELINE_{name}": LINK for name in PORTS})
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --start-timeout: must be in (0")


@pytest.mark.parametrize("value", ["abc", "http://10.96.1.2:50151", "10.96.1.2:50151"])
def test_a_bad_port_variable_is_refused_by_name(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HTTP_PORT", value)
    done = command("serve", "--start-timeout", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: PACELINE_HTTP_PORT: ")


def test_only_links_in_port_variables_are_removed() -> None:
    """Children are started with the remaining environment."""
    kept = {
        "GRPC_EXPERIMENTS": GRPC_EXPERIMENTS,
        "PACELINE_HTTP_PORT": "8000",
        "PACELINE_TARGET": LINK,
        "PACELINE_PORT_50151_TCP": LINK,
        "OTHER_PORT": LINK,
    }
    links = {
        "PACELINE_PORT": LINK,
        "PACELINE_DRAFT_PORT": "udp://[fd00::1]:1",
        "PACELINE_X_PORT": "sctp://h:1",
    }
    environment = kept | links
    prepare(environment)
    assert environment == kept
