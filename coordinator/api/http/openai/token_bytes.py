"""The bytes of one token, even if they are not whole characters."""

from __future__ import annotations

import re
from typing import Final

from coordinator.text.detokenizer import REPLACEMENT
from coordinator.text.vocabulary import Vocabulary

_ONE_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
"""The name of a byte's token in vocabularies with byte fallback."""
_SHOWN: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = sorted({*range(0x100)}.difference(_SHOWN))
BYTES: Final = {chr(byte): byte for byte in _SHOWN} | {chr(0x100 + i): b for i, b in enumerate(_OTHERS)}
"""The alphabet of byte-level BPE, as in GPT-2: printable Latin-1 bytes as themselves, the others in order
from U+0100 on."""


def token_bytes(vocabulary: Vocabulary, token_id: int) -> bytes | None:
    """The UTF-8 bytes that a token adds to a text; None if only its text with U+FFFD is known."""
    text = vocabulary.token_text(token_id)
    if REPLACEMENT not in text:
        return text.encode()
    token = vocabulary.tokenizer.id_to_token(token_id) or ""
    if (named := _ONE_BYTE.fullmatch(token)) is not None:
        return bytes([int(named[1], 16)])
    if REPLACEMENT in token:
        return text.encode()
    if not BYTES.keys() >= set(token):
        return None
    raw = bytes(BYTES[character] for character in token)
    # A vocabulary may use these characters with another meaning.
    return raw if raw.decode(errors="replace") == text else None
