"""Variables that Kubernetes sets for Services with names of our options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.cli.environment import GRPC_EXPERIMENTS, prepare

pytestmark = pytest.mark.slow


LINK = "tcp://10.96.1.2:50151"
PORTS = ["PORT", "HTTP_PORT", "TARGET_PORT", "DRAFT_PORT", "METRICS_PORT"]
# Refused once all options have been read, before anything is started.
REFUSED = "--start-timeout: must be in (0"


def _serve(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from paceline.cli import main; main()", "serve", "--start-timeout", "0"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_service_links_are_not_ports() -> None:
    """Kubernetes sets PACELINE_PORT for a Service named `paceline`."""
    ended = _serve(**{f"PACELINE_{name}": LINK for name in PORTS})
    assert (ended.returncode, ended.stderr.startswith(f"error: {REFUSED}")) == (2, True), ended.stderr


@pytest.mark.parametrize("value", ["abc", "http://10.96.1.2:50151", "10.96.1.2:50151"])
def test_a_bad_port_variable_is_refused_by_name(value: str) -> None:
    ended = _serve(PACELINE_HTTP_PORT=value)
    assert (ended.returncode, ended.stderr.startswith("error: PACELINE_HTTP_PORT: ")) == (2, True), (
        ended.stderr
    )


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
