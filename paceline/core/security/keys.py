"""API keys as stored: the hash, the holder's name and limits.

A key is 256 random bits and cannot be guessed, so a plain SHA-256 is as safe as a slow hash. The file of keys
is JSON: `{"keys": [{"name", "sha256", "requests_per_minute", "max_sequences", "admin"}, …]}`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.validation import from_mapping, integer, require

PREFIX: Final = "pl-"
"""Prefix of every key, so that a search finds leaked keys."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def digest(token: str) -> str:
    """The stored SHA-256 of a key, in hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key's hash, holder and limits; only the holder has the key itself."""

    name: str
    """The holder: letters, digits, `.`, `_` and `-`. It names the tenant in logs and caches."""
    sha256: str
    """SHA-256 of the key, in hexadecimal."""
    requests_per_minute: int | None = None
    """Average rate of gRPC and HTTP calls, and their largest burst. None sets no limit. Cancelling and
    resuming are not counted."""
    max_sequences: int | None = None
    """Sequences running or waiting at a time; each prompt and each of its `n` completions counts. None sets
    no limit."""

    admin: bool = False
    """May profile workers (`paceline profile`)."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        require(isinstance(self.admin, bool), "admin", "must be true or false")
        most = limits.MAX_KEY_NAME_CHARACTERS
        require(isinstance(self.name, str) and bool(_NAME.fullmatch(self.name)), "name", "must be a word")
        require(len(self.name) <= most, "name", f"at most {most} characters")
        known = isinstance(self.sha256, str) and bool(_SHA256.fullmatch(self.sha256))
        require(known, "sha256", "must be 64 hexadecimal digits")
        for name, bound in (
            ("requests_per_minute", limits.MAX_REQUESTS_PER_MINUTE),
            ("max_sequences", limits.MAX_RUNNING_SEQUENCES + limits.MAX_WAITING_SEQUENCES),
        ):
            value = getattr(self, name)
            if value is not None:
                require(1 <= integer(name, value) <= bound, name, f"must be between 1 and {bound}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Raises InvalidArgumentError naming the field, also for an unknown one."""
        for name in ("name", "sha256"):
            require(name in values, name, "is required")
        result: Self = from_mapping(cls, values)
        return result


class KeyRing:
    """All keys of a server."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        """Raises InvalidArgumentError for too many keys, or two with the same name or hash."""
        self.keys: Final = tuple(keys)
        require(len(self.keys) <= limits.MAX_API_KEYS, "keys", f"at most {limits.MAX_API_KEYS}")
        for what in ("name", "sha256"):
            values = [getattr(key, what) for key in self.keys]
            require(len(set(values)) == len(values), "keys", f"two have the same {what}")

    def find(self, token: str) -> ApiKey | None:
        """The entry of this key, in constant time: every hash is compared in full."""
        wanted, found = digest(token), None
        for key in self.keys:
            if hmac.compare_digest(key.sha256, wanted):
                found = key
        return found


def parse(text: str) -> KeyRing:
    """Parse a file's content. Raises InvalidArgumentError; its message reveals none of the content."""
    try:
        content = json.loads(text)
    except ValueError:
        raise InvalidArgumentError("api_keys", "is not JSON") from None
    if not (isinstance(content, dict) and set(content) == {"keys"} and isinstance(content["keys"], list)):
        raise InvalidArgumentError("api_keys", 'must be an object {"keys": […]}')
    keys = []
    for position, entry in enumerate(content["keys"]):
        require(isinstance(entry, dict), "api_keys", f"entry {position} must be an object")
        try:
            keys.append(ApiKey.from_mapping(entry))
        except InvalidArgumentError as error:
            raise InvalidArgumentError("api_keys", f"entry {position}: {error.message}") from None
    return KeyRing(keys)


def render(ring: KeyRing) -> str:
    """The file's content; unset limits are omitted, and `admin` unless it is true."""
    entries = [
        {name: value for name, value in asdict(key).items() if value not in (None, False)}
        for key in ring.keys
    ]
    return json.dumps({"keys": entries}, indent=2) + "\n"
