"""Peers join when they can, and say why when they cannot."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from paceline.bench.bandwidth import read_bandwidth
from paceline.bench.peers import Peer, PeerAbsentError, PeerArm, PeerSetup, PeerState, join
from paceline.bench.peers.gguf_file import _interleaved


@pytest.fixture
def setup(tmp_path: Path) -> PeerSetup:
    return PeerSetup(
        target="target",
        draft="draft",
        device="cpu",
        target_dtype="float32",
        draft_dtype="float32",
        threads=1,
        k=4,
        folder=tmp_path,
    )


def raising(error: Exception) -> Peer:
    def load(setup: PeerSetup) -> NoReturn:
        raise error

    package = "pytest" if "installed" in str(error) else "surely-not-installed"
    return Peer("theirs", package, load)


def test_one_that_is_there_joins_with_its_version(setup: PeerSetup) -> None:
    arm = PeerArm("theirs, fast", lambda *_: 1)
    arms, (state,) = join(setup, [Peer("theirs", "pytest", lambda _: [arm])])
    assert arms == [arm]
    assert (state.name, state.version, state.absent) == ("theirs", pytest.__version__, "")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ImportError("No module named x"), "pip install surely-not-installed"),
        (ImportError("installed, but a library is missing"), "installed, but a library is missing"),
        (PeerAbsentError("only Llama checkpoints"), "only Llama checkpoints"),
    ],
)
def test_one_that_cannot_join_says_why_and_the_others_do(
    setup: PeerSetup, error: Exception, told: str
) -> None:
    arm = PeerArm("other", lambda *_: 1)
    arms, states = join(setup, [raising(error), Peer("other", "pytest", lambda _: [arm])])
    assert arms == [arm]
    assert states[0].absent == told
    assert states[1] == PeerState("other", pytest.__version__)


def test_rows_that_rotate_together_stand_side_by_side() -> None:
    numpy = pytest.importorskip("numpy")
    heads, half, columns = 3, 4, 2
    rows = numpy.arange(heads * 2 * half)[:, None] * numpy.ones((1, columns))
    moved = _interleaved(rows, heads)[:, 0].reshape(heads, half, 2)
    assert (moved[..., 1] - moved[..., 0] == half).all()
    assert sorted(moved.ravel()) == list(range(heads * 2 * half))


def test_bandwidth_is_measured_with_the_model_s_threads_and_leaves_ours() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    assert read_bandwidth("cpu", 1, num_bytes=2**20) > 0
    assert torch.get_num_threads() == before
