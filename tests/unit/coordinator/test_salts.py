"""Whose cached prefixes a request may use."""

from __future__ import annotations

from coordinator.generation import workers_salt
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.generation_codec import GenerateCall


def call(salt: str) -> GenerateCall:
    return GenerateCall("id", (1, 2), SamplingParams(), SpeculationParams(), salt)


def test_tenants_share_nothing_whatever_they_say() -> None:
    said = ("", "b", ":b", "a:")
    salts = [workers_salt(call(salt), tenant) for tenant in ("a", "ab", "a:b", "2:a") for salt in said]
    assert len(set(salts)) == len(salts)


def test_without_keys_the_salt_is_the_client_s() -> None:
    assert workers_salt(call("mine"), "") == "mine"
