"""Checks in a request's head which host it is for and where its body ends (RFC 9112, 3.2 and 6).

If a head is ambiguous, a proxy in front and this server may read it differently, and one client's body
becomes another client's request. The parser refuses most of these heads; this module refuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HOST = re.compile(rb"[\w.~%!$&'()*+;=:\[\]-]*\Z", re.ASCII)
_VERSIONS = ("1.0", "1.1")


class HeadError(Exception):
    """The request is answered 400, and its connection is closed."""


def check(version: str, url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises HeadError. Names in `headers` are lower case."""
    if version not in _VERSIONS:
        raise HeadError("its version of HTTP is not 1.0 or 1.1")
    hosts = [value.strip() for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise HeadError("it must have one Host")
    if not all(map(_HOST.match, hosts)):
        raise HeadError("its Host has characters that no host has")
    named = _host_in(url)
    if named is not None and hosts and named.lower() != hosts[0].lower():
        raise HeadError("its Host is not that of its target")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (codings != [b"chunked"] or version == "1.0"):
        raise HeadError("its only transfer coding may be chunked")


def _host_in(url: bytes) -> bytes | None:
    """The authority of a target in absolute form; None for other forms."""
    scheme, found, rest = url.partition(b"://")
    if not found or not scheme.isalpha():
        return None
    return re.split(rb"[/?#]", rest, maxsplit=1)[0]
