"""One `serve` with certificates on every port, mTLS for clients too, and API keys: through the SDK, OpenAI's
client and the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from harness.certificates import Certificates, says_nothing
from harness.log import Log
from harness.pair import Pair
from harness.secret import SECRET
from harness.stacks import own_coordinator, stack_config
from harness.waiting import HANG, until

from paceline.cli import main
from paceline.client import Client, SpeculationParams, WorkerState
from paceline.core.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.core.security.tls import Tls
from paceline.rpc.security.credentials import open_channel
from paceline.supervisor import Stack, serve_stack

PROMPT = "def main():"
SAMPLING: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
LONG: dict[str, Any] = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


def paceline(*words: str) -> int:
    """One command in this process; its exit code."""
    with pytest.raises(SystemExit) as end:
        main(words)
    return int(end.value.code or 0)


def made_key(capsys: pytest.CaptureFixture[str], file: Path, name: str, *limits: str) -> str:
    """A new key's token, as `paceline keys add` prints it."""
    assert paceline("keys", "add", name, "--api-keys", str(file), *limits) == 0
    return capsys.readouterr().out.strip()


@dataclass
class Secure:
    """The running stack, its certificates, its keys and its logs."""

    stack: Stack
    certificates: Certificates
    file: Path
    tokens: dict[str, str]
    log: Log

    def client(self, name: str | None = "alice", role: str | None = "client") -> Client:
        """The SDK as a key's holder, with the certificate of a role."""
        tls = Tls(ca=self.certificates.ca) if role is None else self.certificates.tls(role)
        return Client(
            self.stack.address, tls=tls, api_key=None if name is None else self.tokens.get(name, name)
        )

    @contextlib.contextmanager
    def openai(self, name: str = "alice", role: str | None = "client") -> Iterator[openai.OpenAI]:
        """OpenAI's client likewise."""
        with (
            openai.DefaultHttpxClient(verify=self.certificates.context(role)) as http,
            openai.OpenAI(
                base_url=f"https://{self.stack.http_address}/v1",
                api_key=self.tokens.get(name, name),
                http_client=http,
                max_retries=0,
                timeout=HANG,
            ) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def secure(pair_paths: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    from paceline.core.security.keyfile import write_keys
    from paceline.core.security.keys import ApiKey, KeyRing, digest

    folder = tmp_path_factory.mktemp("secure")
    certificates = Certificates.made(folder / "certificates")
    tokens = {name: f"pl-a-token-of-{name}" for name in ("alice", "other", "slow", "single", "leaving")}
    limits: dict[str, dict[str, int]] = {"slow": {"requests_per_minute": 2}, "single": {"max_sequences": 1}}
    file = folder / "keys.json"
    keys = [ApiKey(name=n, sha256=digest(token), **limits.get(n, {})) for n, token in tokens.items()]
    write_keys(file, KeyRing(keys))
    log = Log()
    config = stack_config(
        pair_paths, certificates=str(certificates.folder), tls_ca=certificates.ca, api_keys=str(file)
    )
    with serve_stack(config, sink=log) as stack:
        yield Secure(stack, certificates, file, tokens, log)
    everything = "\n".join(log.lines)
    for token in tokens.values():
        assert token not in everything
        assert digest(token) not in everything
    assert SECRET.text not in everything
    assert "Traceback" not in everything


# ---- it works -------------------------------------------------------------------------------------


def test_clients_with_certificate_and_key_are_served(secure: Secure) -> None:
    with secure.client() as client, secure.openai() as web:
        # A service that is to choose K may well not draft in its first dozen rounds.
        drafts = SpeculationParams(num_speculative_tokens=2, prompt_lookup=False)
        want = client.generate(PROMPT, SAMPLING, speculation=drafts, timeout=HANG)
        workers = {worker.role: worker.state for worker in client.status().workers}
        (model,) = web.models.list().data
        got = web.completions.create(model=model.id, prompt=PROMPT, **SAMPLING)
        stream = web.completions.create(model=model.id, prompt=PROMPT, stream=True, **SAMPLING)
        streamed = "".join(chunk.choices[0].text for chunk in stream)
    assert workers == {"target": WorkerState.READY, "draft": WorkerState.READY}
    assert want.speculative_decoding.num_draft_tokens > 0
    assert want.text == got.choices[0].text == streamed


def test_the_command_line_works_with_tls(
    secure: Secure, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = secure.certificates.tls("client")
    tls = ["--tls-ca", mine.ca, "--tls-certificate", mine.certificate, "--tls-key", mine.key]
    address = ["--address", secure.stack.address]
    monkeypatch.setenv("PACELINE_API_KEY", secure.tokens["alice"])
    assert paceline("generate", PROMPT, "--max-tokens", "4", "--temperature", "0", *address, *tls) == 0
    assert capsys.readouterr().out
    assert paceline("status", "--json", *address, *tls) == 0
    assert json.loads(capsys.readouterr().out)["coordinator"]["http_address"]
    assert paceline("health", secure.stack.address, *tls) == 0
    monkeypatch.setenv("PACELINE_API_KEY", "pl-wrong")
    assert paceline("health", secure.stack.address, *tls) == 0
    assert capsys.readouterr().out == "SERVING\nSERVING\n"
    assert paceline("status", *address, *tls) == 1
    assert capsys.readouterr().err == "error: a valid API key is required\n"
    name = ["--tls-server-name", "target.paceline.internal"]
    assert paceline("health", secure.stack.address, *tls, *name, "--timeout", "5") == 1
    assert paceline("health", secure.stack.address, *tls[:4]) == 2
    assert "--tls-key: is required" in capsys.readouterr().err


def test_a_worker_passes_its_own_health_check(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the check uses the server's own settings."""
    own = secure.certificates.tls("target")
    for name, value in (("CA", own.ca), ("CERTIFICATE", own.certificate), ("KEY", own.key)):
        monkeypatch.setenv(f"PACELINE_TLS_{name}", value)
    assert paceline("health", secure.stack.address_of("target")) == 0


# ---- wrong key, no key ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "pl-wrong"])
def test_a_call_without_a_valid_key_is_refused(name: str | None, secure: Secure) -> None:
    with secure.client(name) as client, pytest.raises(UnauthenticatedError) as failure:
        client.generate(PROMPT, SAMPLING, timeout=HANG)
    says_nothing(failure.value.message, "pl-wrong", "alice")
    with secure.openai(name or "none") as web, pytest.raises(openai.AuthenticationError) as refused:
        web.models.list()
    assert refused.value.status_code == 401
    assert refused.value.code == "invalid_api_key"
    says_nothing(refused.value.response.text, "pl-wrong", "alice")


# ---- wrong certificate ----------------------------------------------------------------------------


def test_a_client_without_a_certificate_is_refused(secure: Secure, tmp_path: Path) -> None:
    strangers = Certificates.made(tmp_path / "strangers")
    for tls in (None, Tls(ca=secure.certificates.ca), strangers.tls("client", ca=secure.certificates.ca)):
        with Client(secure.stack.address, tls=tls, api_key=secure.tokens["alice"]) as client:
            with pytest.raises(UnavailableError) as failure:
                client.status(timeout=HANG)
            says_nothing(failure.value.message, secure.tokens["alice"])
    with secure.openai(role=None) as web, pytest.raises(openai.APIConnectionError):
        web.models.list()
    with secure.client() as client:
        assert client.status(timeout=HANG)


def handshake(address: str, context: ssl.SSLContext) -> str | None:
    """The version that was agreed on; raises SSLError with what the server said instead."""
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), HANG) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        return wrapped.version()


REFUSALS = (None, "TLSV1_ALERT_PROTOCOL_VERSION", "UNEXPECTED_EOF_WHILE_READING")


@pytest.mark.parametrize("port", ["gRPC", "HTTP", "target", "draft"])
def test_ports_refuse_tls_older_than_1_2(secure: Secure, port: str) -> None:
    own = secure.stack
    address = {"gRPC": own.address, "HTTP": own.http_address}.get(port) or own.address_of(port)

    def context(version: ssl.TLSVersion) -> ssl.SSLContext:
        made = secure.certificates.context("coordinator")
        # What OpenSSL would leave out by itself, or the refusal would be this side's.
        made.set_ciphers("DEFAULT:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made.minimum_version = made.maximum_version = version
        return made

    for old in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        with pytest.raises((ssl.SSLError, ConnectionResetError)) as failure:
            handshake(address, context(old))
        # The server's refusal, with or without a word; without protocols or ciphers nothing would be asked.
        assert getattr(failure.value, "reason", None) in REFUSALS
    assert handshake(address, context(ssl.TLSVersion.TLSv1_2)) == "TLSv1.2"


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_worker_may_not_request_generations(role: str, secure: Secure) -> None:
    with secure.client(role=role) as client:
        for call in (client.status, client.models, lambda: client.generate(PROMPT, SAMPLING)):
            with pytest.raises(PermissionDeniedError) as failure:
                call()
            says_nothing(failure.value.message, role)
    with secure.openai(role=role) as web, pytest.raises(openai.PermissionDeniedError) as refused:
        web.models.list()
    assert refused.value.code == "permission_denied"
    says_nothing(refused.value.response.text, role)


@pytest.mark.parametrize(("worker", "role"), [("target", "client"), ("target", "draft"), ("draft", "target")])
def test_a_real_worker_accepts_only_a_coordinator(worker: str, role: str, secure: Secure) -> None:
    address = secure.stack.address_of(worker)

    def ask(tls: Tls | None) -> grpc.StatusCode | None:
        with open_channel(address, (), tls) as channel:
            call = channel.unary_unary(f"/paceline.v1.{worker.capitalize()}Service/GetWorkerInfo")
            try:
                call(b"", timeout=HANG, metadata=SECRET.metadata)
            except grpc.RpcError as error:
                return error.code()
        return None

    assert ask(secure.certificates.tls("coordinator")) is None
    assert ask(secure.certificates.tls(role)) is grpc.StatusCode.PERMISSION_DENIED
    assert ask(None) is grpc.StatusCode.UNAVAILABLE
    assert ask(Tls(ca=secure.certificates.ca)) is grpc.StatusCode.UNAVAILABLE


# ---- too many -------------------------------------------------------------------------------------


def test_a_keys_rate_covers_grpc_and_http(secure: Secure) -> None:
    with secure.client("slow") as client, secure.openai("slow") as web:
        client.models()
        web.models.list()
        with pytest.raises(ResourceExhaustedError) as failure:
            client.generate(PROMPT, SAMPLING, timeout=HANG)
        assert failure.value.retry_after is not None
        assert 0 < failure.value.retry_after <= 30
        with pytest.raises(openai.RateLimitError) as refused:
            web.models.list()
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 30
        says_nothing(failure.value.message + refused.value.response.text, "slow")
    with secure.client("alice") as other:
        other.models()


def test_a_keys_sequence_limit_covers_grpc_and_http(secure: Secure) -> None:
    with secure.client("single") as client, secure.openai("single") as web:
        model = web.models.list().data[0].id

        def ask() -> Any:
            return web.completions.create(model=model, prompt=PROMPT, **SAMPLING)

        # More than is sent to a client that does not read: it cannot end meanwhile.
        with client.stream(PROMPT, {**LONG, "max_tokens": 1500, "logprobs": 20}) as stream:
            next(stream)
            with pytest.raises(openai.RateLimitError) as refused:
                ask()
            assert refused.value.response.headers["retry-after"]
            with pytest.raises(ResourceExhaustedError):
                client.generate(PROMPT, SAMPLING, timeout=HANG)
            assert client.status().coordinator.running == 1

        def served() -> Any:
            with contextlib.suppress(openai.RateLimitError):
                return ask()

        assert until(served, "room after the stream's end").choices
        for many in ({"n": 2}, {"prompt": [PROMPT, PROMPT]}):
            request = {"model": model, "prompt": PROMPT, **SAMPLING, **many}
            with pytest.raises(openai.RateLimitError):
                web.completions.create(**request)  # type: ignore[call-overload]
        assert ask().choices


# ---- keys come and go -----------------------------------------------------------------------------


def test_a_key_can_be_revoked_while_the_server_runs(
    secure: Secure, capsys: pytest.CaptureFixture[str]
) -> None:
    token = made_key(capsys, secure.file, "newcomer", "--max-sequences", "2")
    assert len(token) > 40
    assert token not in secure.file.read_text()
    assert paceline("keys", "add", "newcomer", "--api-keys", str(secure.file)) == 2
    assert paceline("keys", "remove", "leaving", "--api-keys", str(secure.file)) == 0
    assert paceline("keys", "remove", "leaving", "--api-keys", str(secure.file)) == 2
    assert paceline("keys", "list", "--api-keys", str(secure.file)) == 0
    listed = capsys.readouterr().out
    assert "newcomer: 2 sequences at a time\n" in listed
    assert "alice: no limits\n" in listed
    with secure.client("leaving") as leaving, secure.client(token) as newcomer:
        # More than is sent to a client that does not read: it runs still when the key is gone.
        stream = leaving.stream(PROMPT, {**LONG, "max_tokens": 1500, "logprobs": 20}, timeout=HANG)
        next(stream)
        with pytest.raises(UnauthenticatedError):
            newcomer.models()
        os.kill(secure.stack.pid("coordinator"), signal.SIGHUP)

        def let_in() -> bool:
            with contextlib.suppress(UnauthenticatedError):
                return bool(newcomer.models())
            return False

        until(let_in, "the new key")
        with pytest.raises(UnauthenticatedError):
            leaving.models()
        assert newcomer.status().coordinator.running == 1
        for _ in stream:
            pass
        assert len(stream.result.token_ids) == 1500
        assert stream.num_resumes == 0


# ---- what was computed for one key ------------------------------------------------------------------


def test_keys_do_not_share_the_prefix_cache(secure: Secure) -> None:
    """With equal prompts and salts: the time to the first token reveals nothing about others."""
    prompt = list(range(5, 105))
    with secure.client("alice") as alice, secure.client("other") as other:

        def hits(client: Client) -> dict[str, int]:
            before = found()
            speculation = SpeculationParams(num_speculative_tokens=2, prompt_lookup=False)
            client.generate(prompt, SAMPLING, speculation=speculation, cache_salt="ours", timeout=HANG)
            return {role: count - before[role] for role, count in found().items()}

        def found() -> dict[str, int]:
            return {w.role: w.info.cache.prefix_cache_hits for w in alice.status().workers if w.info}

        nothing = {"target": 0, "draft": 0}
        assert hits(alice) == nothing
        assert hits(other) == nothing
        for client in (alice, other):
            assert min(hits(client).values()) > 0


# ---- a coordinator's own bounds -------------------------------------------------------------------


def test_a_too_old_request_ends_and_frees_its_memory(secure: Secure, pair_paths: Pair) -> None:
    mine = secure.certificates.tls("coordinator")
    workers = {
        "worker_tls_certificate": mine.certificate,
        "worker_tls_key": mine.key,
        "worker_tls_ca": mine.ca,
    }
    target = secure.stack.address_of("target")
    with own_coordinator(pair_paths, [target], max_request_seconds=0.02, **workers) as own:
        with pytest.raises(DeadlineExceededError, match="older than"):
            own.client.generate(PROMPT, {**LONG, "max_tokens": 1500}, timeout=HANG)
        # Its client reads nothing: it is ended all the same.
        with own.client.stream(PROMPT, {**LONG, "max_tokens": 1500}):
            until(lambda: own.client.status().coordinator.failed_requests >= 2, "the end of the second one")
            assert own.client.status().coordinator.running == 0
