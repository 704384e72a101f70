"""Salts that separate tenants' cached prefixes."""

from __future__ import annotations

from coordinator.app import Coordinator
from coordinator.requests.generation import workers_salt
from coordinator.text.vocabulary import Vocabulary
from paceline.core.config import CoordinatorConfig
from paceline.core.security.secret import WorkerSecret, new_secret
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec.generation import GenerateCall

KEY = b"k" * 32


def call(salt: str) -> GenerateCall:
    return GenerateCall("id", (1, 2), SamplingParams(), SpeculationParams(), salt)


def test_salts_of_tenants_never_coincide() -> None:
    said = ("", "b", ":b", "a:")
    salts = [workers_salt(call(salt), tenant, KEY) for tenant in ("a", "ab", "a:b", "2:a") for salt in said]
    assert len(set(salts)) == len(salts)


def test_a_tenants_salt_depends_on_the_key() -> None:
    salts = {workers_salt(call("b"), "a", key) for key in (KEY, b"l" * 32)}
    assert len(salts) == 2
    assert not any("a:b" in salt for salt in salts)
    assert salts == {workers_salt(call("b"), "a", key) for key in (KEY, b"l" * 32)}


def test_without_keys_the_salt_is_the_clients() -> None:
    assert workers_salt(call("mine"), "", KEY) == "mine"


def test_the_salt_key_follows_from_the_secret() -> None:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="embedded:target")
    vocabulary = Vocabulary.load(config.tokenizer)
    secret = WorkerSecret(new_secret())
    with_secret = [Coordinator(config, vocabulary, secret=secret)._salt_key for _ in range(2)]
    without = [Coordinator(config, vocabulary)._salt_key for _ in range(2)]
    assert with_secret[0] == with_secret[1]
    assert len({*with_secret, *without}) == 3
