"""What a peer is given, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

Generate = Callable[[Sequence[int], float, int, int], int]
"""(prompt ids, temperature, seed, max tokens) -> how many tokens it generated; EOS does not end it."""


class PeerAbsentError(Exception):
    """The peer cannot take part; the message says why, or how to install it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetup:
    """The same for every peer."""

    target: str
    """A directory or a hub id."""
    draft: str
    device: str
    """`cpu`, or a CUDA device as torch names it."""
    target_dtype: str
    draft_dtype: str
    threads: int
    k: int
    """num_speculative_tokens, where a peer speculates."""
    folder: Path
    """For converted checkpoints; gone after the run."""


@dataclass(frozen=True, slots=True)
class PeerArm:
    """One way in which a peer decodes."""

    name: str
    generate: Generate


@dataclass(frozen=True, slots=True)
class Peer:
    """One other system. `load` raises PeerAbsentError; `package` is what tells its version."""

    name: str
    package: str
    load: Callable[[PeerSetup], list[PeerArm]]


@dataclass(frozen=True, slots=True)
class PeerState:
    """Whether a peer took part."""

    name: str
    version: str | None
    absent: str = ""
    """Why it did not; empty when it did."""
