"""Log lines at the start of a coordinator."""

from __future__ import annotations

import logging

import pytest

from coordinator.main import tell_of_client_certificates
from paceline.core.config import CoordinatorConfig

ITS_OWN = {"tls_certificate": "its.pem", "tls_key": "its.key"}


@pytest.mark.parametrize(
    ("tls", "told"), [({}, False), (ITS_OWN, False), ({**ITS_OWN, "tls_ca": "ca.pem"}, True)]
)
def test_requiring_client_certificates_is_logged(
    tls: dict[str, str], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """PACELINE_TLS_CA, which requires them, is also a variable of client commands."""
    config = CoordinatorConfig(targets=("127.0.0.1:1",), tokenizer="m", **tls)  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        tell_of_client_certificates(config)
    assert ["ca.pem" in record.getMessage() for record in caplog.records] == [True] * told
