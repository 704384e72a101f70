"""The generator: known vectors, the same bits from both implementations, and sane statistics."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from paceline.decoding import noise
from paceline.decoding.cpu.philox import mapped
from paceline.decoding.noise import Purpose, gumbel, philox4x64, philox_torch, uniforms

CPU = torch.device("cpu")
LARGEST = 2**64 - 1


def reference(seed: int, position: int, purpose: int, count: int, draft_index: int = 0) -> np.ndarray:
    key = np.array([seed, purpose], dtype=np.uint64)
    counter = np.array([0, position, draft_index, 0], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (LARGEST,) * 4,
            (LARGEST,) * 2,
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
        (
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
        ),
    ],
)
def test_philox_matches_random123s_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(noise._signed(w)) for w in (*counter, *key))
    assert tuple(int(w) % 2**64 for w in philox4x64((c0, c1, c2, c3), (k0, k1))) == expected


@pytest.mark.parametrize("draft_index", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 4, 7, 1001])
def test_both_implementations_give_the_same_bits(count: int, draft_index: int) -> None:
    streams = list(itertools.product((0, 7, 2**63, LARGEST), (0, 1, 2**40, 2**63 - 1)))
    seeds, positions = [s for s, _ in streams], [p for _, p in streams]
    for purpose in Purpose:
        raw = philox_torch(seeds, positions, purpose, count, CPU, draft_index).numpy().view(np.uint64)
        expected = np.stack([reference(s, p, purpose, count, draft_index) for s, p in streams])
        assert (raw == expected).all()
        numbers = ((expected >> np.uint64(12)) + 0.5) * 2.0**-52
        made = uniforms(seeds, positions, purpose, count, draft_index=draft_index)
        assert (made.numpy() == numbers).all()


def test_other_devices_give_the_same_numbers() -> None:
    """The meta device runs the shapes; the bits are those of `philox_torch`, mapped."""
    meta = uniforms([1, 2], [3, 4], Purpose.COUPLED, 10, torch.device("meta"))
    assert meta.shape == (2, 10)
    assert meta.dtype == torch.float64
    raw = philox_torch([1, 2], [3, 4], Purpose.COUPLED, 10, CPU)
    numbers = ((raw >> 12) & (2**52 - 1)).double().add(0.5).mul(2.0**-52)
    assert torch.equal(numbers, uniforms([1, 2], [3, 4], Purpose.COUPLED, 10))


def test_uniforms_are_never_exactly_zero_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the ends of the raw range; 53 random bits plus a half would round up to 1 there."""

    def ends(*streams: object) -> None:
        *_, values = streams
        assert isinstance(values, np.ndarray)
        values[:] = [mapped(np.uint64(0)), mapped(np.uint64(LARGEST))]

    monkeypatch.setattr(noise, "fill_uniforms", ends)
    low, high = uniforms([0], [0], Purpose.COUPLED, 2)[0].tolist()
    assert (low, high) == (2.0**-53, 1 - 2.0**-53)
    assert bool(torch.isfinite(gumbel([0], [0], 2)).all())


def test_a_stream_depends_on_its_names_only() -> None:
    whole = uniforms([5, 6, 5], [1, 1, 2], Purpose.ACCEPT_TEST, 9)
    alone = uniforms([5], [1], Purpose.ACCEPT_TEST, 20)
    assert torch.equal(whole[0], alone[0, :9])
    again = uniforms([6], [1], Purpose.ACCEPT_TEST, 9)
    assert torch.equal(whole[1:2], again)
    assert uniforms([], [], Purpose.ACCEPT_TEST, 9).shape == (0, 9)
    assert uniforms([1], [1], Purpose.ACCEPT_TEST, 0).shape == (1, 0)


def test_streams_of_different_names_are_uncorrelated() -> None:
    n = 20_000
    streams = [uniforms([3], [8], purpose, n)[0] for purpose in Purpose]
    streams.append(uniforms([3], [8], Purpose.DRAFT_DRAW, n, draft_index=1)[0])
    streams += [uniforms([4], [8], Purpose.COUPLED, n)[0], uniforms([3], [9], Purpose.COUPLED, n)[0]]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams))
    assert float(correlation.abs().max()) < 5 / n**0.5
    # Along positions as well: the first number of many streams.
    first = [uniforms([3] * 4000, range(4000), purpose, 1)[:, 0] for purpose in Purpose]
    first.append(first[0].roll(1))
    correlation = torch.corrcoef(torch.stack(first)) - torch.eye(len(first))
    assert float(correlation.abs().max()) < 5 / 4000**0.5


def test_moments_match_the_distributions() -> None:
    u = uniforms(range(20), range(20), Purpose.DRAFT_DRAW, 10_000).flatten()
    assert float(u.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / len(u)) ** 0.5)
    assert float(u.var()) == pytest.approx(1 / 12, rel=0.02)
    g = gumbel(range(20), range(20), 10_000).flatten()
    assert float(g.mean()) == pytest.approx(0.577216, abs=5 * 1.2825 / len(g) ** 0.5)
    assert float(g.var()) == pytest.approx(torch.pi**2 / 6, rel=0.03)


def test_gumbel_noise_is_mapped_from_the_coupled_stream() -> None:
    u = uniforms([9], [2], Purpose.COUPLED, 50)
    assert torch.allclose(gumbel([9], [2], 50), -(-u.log()).log(), rtol=1e-14, atol=1e-15)
