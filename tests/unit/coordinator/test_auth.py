"""The gate: keys, rates and sequences at a time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.auth import ANYBODY, Gate, Group, NeverFitsError, Principal, TokenBucket, bearer
from paceline.core.clock import ManualClock
from paceline.core.errors import ResourceExhaustedError, UnauthenticatedError
from paceline.core.security.keys import ApiKey, KeyRing, digest


def key(name: str, **limits: int) -> ApiKey:
    return ApiKey(name=name, sha256=digest(f"pl-{name}"), **limits)


@given(
    st.integers(1, 20), st.floats(0.01, 50), st.lists(st.floats(0, 10, allow_subnormal=False), max_size=60)
)
def test_a_bucket_never_exceeds_its_rate(capacity: int, rate: float, pauses: list[float]) -> None:
    bucket, now = TokenBucket(capacity, rate), 0.0
    taken: list[float] = []
    for pause in pauses:
        now += pause
        wait = bucket.take(now)
        assert wait >= 0
        if wait == 0:
            taken.append(now)
        for since in taken:
            within = sum(1 for at in taken if at >= since)
            assert within <= capacity + (now - since) * rate + 1e-6


@given(st.integers(1, 20), st.floats(0.01, 50))
def test_a_bucket_reports_when_the_next_token_is_due(capacity: int, rate: float) -> None:
    bucket = TokenBucket(capacity, rate)
    assert [bucket.take(5.0) for _ in range(capacity)] == [0.0] * capacity
    wait = bucket.take(5.0)
    assert math.isclose(wait, 1 / rate)
    assert bucket.take(5.0 + wait / 2) > 0
    assert bucket.take(5.0 + wait * (1 + 1e-9)) == 0


def test_a_clock_going_back_adds_nothing() -> None:
    bucket = TokenBucket(1, 1)
    assert bucket.take(10.0) == 0
    assert bucket.take(5.0) > 0


def test_without_keys_everyone_is_admitted() -> None:
    gate = Gate()
    assert gate.enter(None) is ANYBODY
    assert gate.enter("anything") is ANYBODY
    assert not gate.asks_for_keys


def test_with_keys_only_holders_are_admitted() -> None:
    gate = Gate(KeyRing([key("alice", max_sequences=3)]))
    assert gate.enter("pl-alice") == Principal("alice", 3)
    told = set()
    for token in (None, "", "pl-bob", digest("pl-alice")):
        with pytest.raises(UnauthenticatedError) as failure:
            gate.enter(token)
        told.add(failure.value.message)
    assert told == {"a valid API key is required"}


def test_an_empty_key_ring_admits_nobody() -> None:
    with pytest.raises(UnauthenticatedError):
        Gate(KeyRing()).enter("pl-alice")


def test_every_key_has_its_own_rate() -> None:
    clock = ManualClock()
    gate = Gate(KeyRing([key("alice", requests_per_minute=2), key("bob", requests_per_minute=2)]), clock)
    for _ in range(2):
        gate.enter("pl-alice")
    with pytest.raises(ResourceExhaustedError) as failure:
        gate.enter("pl-alice")
    assert failure.value.retry_after == pytest.approx(30.0)
    gate.enter("pl-bob")
    clock.advance(30.0)
    gate.enter("pl-alice")


def test_an_invalid_key_uses_nobodys_rate() -> None:
    gate = Gate(KeyRing([key("alice", requests_per_minute=1)]), ManualClock())
    for _ in range(5):
        with pytest.raises(UnauthenticatedError):
            gate.enter("pl-wrong")
    gate.enter("pl-alice")


def test_a_recognised_caller_is_charged_later_and_once() -> None:
    gate = Gate(KeyRing([key("alice", requests_per_minute=1)]), ManualClock())
    alice, *_ = (gate.recognise("pl-alice") for _ in range(3))
    charged = gate.charged(alice)
    assert gate.charged(charged) == charged == Principal("alice")
    with pytest.raises(ResourceExhaustedError):
        gate.charged(gate.recognise("pl-alice"))
    with pytest.raises(UnauthenticatedError):
        gate.recognise("pl-wrong")
    assert gate.charged(Gate().recognise(None)) is ANYBODY


def refused(gate: Gate, caller: Principal, sequences: int) -> ResourceExhaustedError:
    with pytest.raises(ResourceExhaustedError) as failure, gate.holding(caller, sequences):
        pass
    return failure.value


def test_sequences_count_while_they_are_held() -> None:
    gate = Gate(KeyRing([key("alice", max_sequences=3)]))
    alice, bob = gate.enter("pl-alice"), Principal("bob", 1)
    with gate.holding(alice, 1):
        with gate.holding(alice, 2), gate.holding(bob, 1):
            for caller, sequences in ((alice, 1), (alice, 3), (bob, 1)):
                assert refused(gate, caller, sequences).retry_after is not None
        with gate.holding(alice, 2), gate.holding(bob, 1):
            pass
    # It never fits: there is nothing to wait for.
    assert refused(gate, alice, 4).retry_after is None
    with gate.holding(alice, 3):
        pass


def test_a_group_of_requests_fits_together_or_not_at_all() -> None:
    gate = Gate(KeyRing([key("alice", max_sequences=4)]))
    alice = gate.enter("pl-alice")
    group = Group(gate, 3)
    with group.holding(alice, 1):
        assert refused(gate, alice, 2).retry_after is not None, "the other two are counted already"
        with pytest.raises(ResourceExhaustedError), Group(gate, 2).holding(alice, 1):
            pass
        with group.holding(alice, 2):
            assert gate._held == {"alice": 3}
        assert gate._held == {"alice": 1}
    group.close()
    assert gate._held == {}
    with pytest.raises(NeverFitsError), Group(gate, 5).holding(alice, 1):
        pass


def test_counts_of_requests_that_never_begin_are_released() -> None:
    gate = Gate()
    group = Group(gate, 4)
    with group.holding(ANYBODY, 1):
        group.close()
        assert gate._held == {ANYBODY.name: 1}
    group.close()
    assert gate._held == {}


def test_counts_of_failed_requests_are_released() -> None:
    gate = Gate(KeyRing([key("alice", max_sequences=1)]))
    alice = gate.enter("pl-alice")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), gate.holding(alice, 1):
            _ = 1 / 0


def test_new_keys_apply_at_once_and_keep_counts() -> None:
    gate = Gate(KeyRing([key("alice", requests_per_minute=1), key("bob")]), ManualClock())
    with gate.holding(gate.enter("pl-alice"), 1):
        gate.replace(KeyRing([key("alice", requests_per_minute=1, max_sequences=1)]))
        with pytest.raises(UnauthenticatedError):
            gate.enter("pl-bob")
        with pytest.raises(ResourceExhaustedError):
            gate.enter("pl-alice")
        gate.replace(KeyRing([key("alice", requests_per_minute=2, max_sequences=1)]))
        assert "sequences" in refused(gate, gate.enter("pl-alice"), 1).message


@pytest.mark.parametrize(
    ("headers", "token"),
    [
        (["Bearer abc"], "abc"),
        (["bearer  abc "], "abc"),
        (["Bearer"], None),
        (["Bearer "], None),
        (["Basic abc"], None),
        (["abc"], None),
        ([], None),
        (["Bearer abc", "Bearer def"], None),
    ],
)
def test_the_bearer_token_is_read_from_the_header(headers: list[str], token: str | None) -> None:
    assert bearer(headers) == token
