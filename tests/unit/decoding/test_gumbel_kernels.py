"""The kernels for CUDA devices give the noise, the sums and the choices that torch operations give.

Compiled where there is a CUDA device, else in Triton's interpreter on the CPU, which has the same arithmetic
but says nothing about a compiler, a device's logarithm or its threads.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.tiers import mostly_full
from torch import Tensor

from paceline.decoding import coupled
from paceline.decoding.coupled import Noise
from paceline.decoding.cuda import kernels as seam
from paceline.decoding.noise import CoupledNoise, Purpose, gumbel, uniforms

triton = pytest.importorskip("triton", reason="no Triton: pip install '.[cuda-test]'")
tl: Any = pytest.importorskip("triton.language", reason="no Triton")

from paceline.decoding.cuda import gumbel_kernels as kernels  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (triton.knobs.runtime.interpret or torch.cuda.is_available()), reason="no CUDA device, no interpreter"
)
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
LARGEST = 2**64 - 1


@triton.jit
def store_uniforms(seed, position, start, out, tile: tl.constexpr):
    tl.store(
        out + tl.arange(0, tile), kernels.uniforms_of(tl.load(seed), tl.load(position), tl.load(start), tile)
    )


def signed(values: list[int]) -> Tensor:
    return torch.tensor([v - 2**64 if v >= 2**63 else v for v in values], device=DEVICE)


@pytest.mark.parametrize("start", [0, 1024, 127_232])
def test_uniforms_have_the_bits_of_the_generator(start: int) -> None:
    rng = random.Random(start)
    streams = [(0, 0), (LARGEST, 2**63 - 1), (2**63, 1), (rng.randrange(2**64), rng.randrange(2**63))]
    for seed, position in streams:
        found = torch.empty(1024, dtype=torch.float64, device=DEVICE)
        store_uniforms[(1,)](signed([seed]), signed([position]), signed([start]), found, tile=1024)
        assert torch.equal(
            found.cpu(), uniforms([seed], [position], Purpose.COUPLED, start + 1024)[0, start:]
        )


def support(scores: Tensor, kind: str) -> Tensor:
    """The scores, -inf outside the support that a filter leaves."""
    if kind == "all":
        return scores
    if kind == "flat":  # the noise alone chooses
        return torch.zeros_like(scores)
    p = scores.softmax(-1)
    ordered, ids = p.sort(dim=-1, descending=True, stable=True)
    if kind == "top-k":
        kept = torch.arange(p.shape[1]).expand_as(p) < 50
    elif kind == "top-p":
        kept = ordered.cumsum(-1) - ordered < 0.9
    else:
        kept = ordered >= 0.1 * ordered[:, :1]
    return scores.masked_fill(~torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, kept), -torch.inf)


@pytest.mark.parametrize(
    ("vocabulary", "rows", "kind"),
    mostly_full(
        [
            (2048, 3, "all"),
            (2048, 5, "top-p"),
            (9001, 1, "min-p"),
            (4096, 3, "flat"),
            (3, 7, "all"),
            (1, 1, "all"),
            (128_256, 1, "top-k"),
            (2048, 80, "all"),
            (2048, 80, "top-k"),
            (128_256, 2, "all"),
            (128_256, 80, "min-p"),
        ],
        count=7,
    ),
)
def test_sums_and_choices_are_those_of_tensors(vocabulary: int, rows: int, kind: str) -> None:
    """Rows with noise and without, with temperatures and without, each by itself in a wider matrix."""
    rng, generator = random.Random(vocabulary + rows), torch.Generator().manual_seed(rows)
    scores = support(torch.randn(rows, vocabulary, generator=generator) * 3, kind)
    seeds = [rng.choice((rng.randrange(2**64), LARGEST)) for _ in range(rows)]
    positions = [rng.randrange(2**40) for _ in range(rows)]
    noisy = torch.tensor([row % 4 != 1 for row in range(rows)]).long()
    divisors = torch.rand(rows, generator=generator, dtype=torch.float64) + 0.3 if rows % 2 else None
    divided = scores.double() if divisors is None else scores.double() / divisors[:, None]
    expected = divided + gumbel(seeds, positions, vocabulary) * noisy[:, None]

    wide = torch.cat([scores, torch.full((rows, 7), torch.inf)], dim=1).to(DEVICE)[:, :vocabulary]
    streams = noisy.to(DEVICE), signed(seeds), signed(positions)
    on_device = None if divisors is None else divisors.to(DEVICE)
    sums = kernels.add_noise(wide, on_device, *streams).cpu()
    assert_within_an_ulp(sums, expected)
    tokens, values = kernels.choose(wide, on_device, *streams)
    assert tokens.tolist() == expected.argmax(-1).tolist()
    assert torch.equal(values.cpu(), sums.max(-1).values)


def assert_within_an_ulp(found: Tensor, expected: Tensor) -> None:
    up, down = (torch.tensor(sign * torch.inf, dtype=torch.float64) for sign in (1, -1))
    assert bool((found <= torch.nextafter(expected, up)).all())
    assert bool((found >= torch.nextafter(expected, down)).all())


def test_the_lowest_id_among_equals() -> None:
    """Within a tile, and in different tiles and parts."""
    part, tile = kernels.PART, kernels.TILE
    scores = torch.zeros(6, 2 * part + 5)
    equals = [(17, 19), (3, tile), (tile - 1, part), (part, 2 * part + 4), (2 * part + 4,)]
    for row, tokens in enumerate(equals):
        scores[row, list(tokens)] = 2.0
    silent = torch.zeros(6, dtype=torch.int64, device=DEVICE)
    tokens, values = kernels.choose(scores.to(DEVICE), None, silent, silent, silent)
    assert tokens.tolist() == [*(row[0] for row in equals), 0]
    assert values.tolist() == [2.0] * 5 + [0.0]


@pytest.mark.parametrize("vocabulary", [40, 8200])
def test_rows_without_an_allowed_token_have_none(vocabulary: int) -> None:
    """Nor has one that is no number anywhere; a row beside them is chosen as ever."""
    scores = torch.full((3, vocabulary), -torch.inf)
    scores[1] = torch.nan
    scores[2, 7:9] = torch.tensor([torch.nan, -4.0])
    numbers = torch.ones(3, dtype=torch.int64, device=DEVICE)
    tokens, values = kernels.choose(scores.to(DEVICE), None, numbers, numbers, numbers)
    assert tokens.tolist() == [-1, -1, 8]
    assert values[:2].tolist() == [-torch.inf] * 2


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels serve whatever device there is."""
    monkeypatch.setattr(coupled, "gumbel_kernels", lambda device: kernels)


@pytest.mark.usefixtures("used")
def test_requests_are_served_by_the_kernels() -> None:
    """As the compiled choice of a CPU serves them."""
    scores = torch.randn(8, 301, generator=torch.Generator().manual_seed(2)) * 3
    scores[3] = -torch.inf
    scores[:, 5] = -torch.inf
    noise: Noise = [CoupledNoise(LARGEST - row, 9) if row % 4 else None for row in range(8)]
    wanted, on_device = coupled.ranked(scores, noise, 4), scores.to(DEVICE)
    assert (
        coupled._choice_in_tensors(on_device, noise).tolist()
        == coupled.coupled_choice(scores, noise).tolist()
    )
    for count in (1, 4):
        tokens, values = coupled.ranked_in_tensors(on_device, noise, count)
        for row, found, worth in zip(wanted, tokens.tolist(), values.tolist(), strict=True):
            if row[0][1] > -torch.inf:
                assert found == [token for token, _ in row[:count]]
                assert worth == pytest.approx([value for _, value in row[:count]], rel=1e-12)
            else:
                assert worth == [-torch.inf] * count


@pytest.mark.full
def test_the_compiler_takes_all_kernels(tmp_path: Path) -> None:
    """For two generations of cards, none of which has to be there."""
    script = Path(__file__).with_name("compile_gumbel_kernels.py")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    for capability in ("80", "90"):
        done = subprocess.run(
            [sys.executable, "-W", "error", str(script), capability],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 6


def test_a_device_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong tokens, wrong sums and errors all leave the work to torch operations."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("no C compiler")

    def second(*args: Any) -> Any:
        tokens, values = kernels.choose(*args)
        return tokens + 1, values

    for planted in (
        SimpleNamespace(choose=second, add_noise=kernels.add_noise),
        SimpleNamespace(choose=kernels.choose, add_noise=lambda *args: kernels.add_noise(*args) + 1e-9),
        SimpleNamespace(choose=broken, add_noise=broken),
    ):
        monkeypatch.setattr("paceline.decoding.cuda.gumbel_kernels", planted)
        assert seam._tried.__wrapped__(DEVICE) is None
    monkeypatch.undo()
    assert seam._tried.__wrapped__(DEVICE) is kernels
    assert seam.gumbel_kernels(torch.device("cpu")) is None
