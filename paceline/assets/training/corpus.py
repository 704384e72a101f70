"""The training corpus: the standard library of the running Python interpreter.

The standard library is available with every Python and free to use (PSF licence). Files are split into
training and held-out sets by a hash of their relative path, so the split does not depend on directory order.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
HELD_OUT_PERCENT = 4
MAX_FILE_BYTES = 300_000
# Generated tables and third-party wheels are of no use to a small model of code.
SKIPPED_PARTS = frozenset(
    {"site-packages", "encodings", "pydoc_data", "__pycache__", "lib2to3", "tokenizedata", "cjkencodings"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source files in path order with a fixed split; `digest` identifies the exact text."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    digest: str


def _held_out(relative_path: str) -> bool:
    return hashlib.sha256(relative_path.encode()).digest()[0] * 100 // 256 < HELD_OUT_PERCENT


def read(root: Path | None = None) -> Corpus:
    """Read every UTF-8 source file below `root` (default: this interpreter's standard library)."""
    train: list[str] = []
    held_out: list[str] = []
    digest = hashlib.sha256()
    for relative, path in _files(root):
        text = _text(path)
        if text is not None:
            digest.update(relative.encode() + b"\0" + text.encode())
            (held_out if _held_out(relative) else train).append(text)
    return Corpus(tuple(train), tuple(held_out), digest.hexdigest())


def sample(every: int, root: Path | None = None) -> tuple[str, ...]:
    """One in `every` files of the training set."""
    files = [path for relative, path in _files(root) if not _held_out(relative)]
    return tuple(text for path in files[::every] if (text := _text(path)) is not None)


def _files(root: Path | None) -> Iterator[tuple[str, Path]]:
    """Relative and full paths of the source files below `root`, in order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED_PARTS & set(path.relative_to(root).parts):
            yield path.relative_to(root).as_posix(), path


def _text(path: Path) -> str | None:
    """The content of a file; None if it is too short, too long or not UTF-8."""
    data = path.read_bytes()
    if not 200 <= len(data) <= MAX_FILE_BYTES:
        return None
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def train_tokenizer(texts: tuple[str, ...]) -> Tokenizer:
    """Train a byte-level BPE, which can encode every byte string."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: tuple[str, ...]) -> np.ndarray:
    """All files as one flat uint16 array, each preceded by the end-of-text token."""
    pieces: list[int] = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        pieces.append(END_OF_TEXT_ID)
        pieces.extend(encoding.ids)
    return np.asarray(pieces, dtype=np.uint16)


def window(tokens: np.ndarray, length: int, count: int, seed: int, step: int) -> np.ndarray:
    """`count` windows of `length + 1` tokens: a pure function of (seed, step), so resuming is exact.

    Returns int64 [count, length + 1].
    """
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(tokens) - length - 1, size=count)
    return tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64)
