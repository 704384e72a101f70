"""A fingerprint that tells whether two processes use the same token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 (hex) over the (token, id) pairs sorted by token, added tokens included.

    Each token is hashed as its UTF-8 length, its bytes and its id, so the encoding is unambiguous.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(vocabulary.items()):
        encoded = token.encode("utf-8", "surrogatepass")
        digest.update(b"%d:%b=%d;" % (len(encoded), encoded, token_id))
    return digest.hexdigest()
