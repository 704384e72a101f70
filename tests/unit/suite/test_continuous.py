"""The harness of streams that go on: it reports a stream that is not as it must be."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from harness.continuous import Case, Continuous

CASE = Case([1], {}, [5, 6, 7])


class Pretended:
    """A client whose streams consist of these chunks, each an index and tokens."""

    def __init__(self, *chunks: tuple[int, Sequence[int]], resumes: int = 0) -> None:
        self.chunks = chunks
        self.resumes = resumes

    @contextlib.contextmanager
    def stream(self, *_: Any, **__: Any) -> Iterator[Any]:
        yield _Stream(self.chunks, self.resumes)


class _Stream:
    def __init__(self, chunks: Sequence[tuple[int, Sequence[int]]], resumes: int) -> None:
        self.chunks = chunks
        self.num_resumes = resumes

    def __iter__(self) -> Iterator[Any]:
        if not self.chunks:
            raise OSError("lost")
        return (SimpleNamespace(index=index, token_ids=tokens) for index, tokens in self.chunks)


def run(client: Any) -> Continuous:
    with Continuous([client], [CASE], 2) as streams:
        streams.wait_for_more(4)
    return streams


def test_good_streams_are_counted() -> None:
    streams = run(Pretended((0, [5]), (1, [6, 7]), resumes=1))
    assert streams.completed >= 4
    assert streams.resumed == streams.completed


@pytest.mark.planted
@pytest.mark.parametrize(
    "client",
    [
        Pretended((0, [5]), (0, [5]), (1, [6, 7])),
        Pretended((0, [5]), (2, [7])),
        Pretended((0, [5, 6])),
        Pretended((0, [5, 6, 8])),
        Pretended(),
    ],
    ids=["doubled", "lost", "cut", "another", "failed"],
)
def test_a_bad_stream_is_reported(client: Pretended) -> None:
    with pytest.raises(AssertionError):
        run(client)
