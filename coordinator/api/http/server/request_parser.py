"""The HTTP request parser of a server that supports no protocol upgrade.

A client may offer an upgrade (`Upgrade`, RFC 9110 7.8), as the JDK's client and `curl --http2` do, and a
server may ignore the offer. httptools cannot ignore it: it takes the offer as accepted, so the request has no
body and the bytes after the head belong to the other protocol. Therefore the head of such a request is parsed
again without the offer.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Head(Protocol):
    """The protocol's state of the request that is being parsed."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(httptools.HttpRequestParser):
    """httptools' parser. If `offers_upgrade` is true in a callback, ignore the callback: it comes again."""

    def __init__(self, protocol: Head) -> None:
        self._protocol = protocol
        self._reset()

    def _reset(self) -> None:
        """Reset to the state of a new parser."""
        super().__init__(self._protocol)
        # Set as in uvicorn: the first of several requests is answered, even if it closes the connection.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def offers_upgrade(self) -> bool:
        """True if the request whose head is complete will be parsed again. CONNECT is not an offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Raises HttpParserError for data that is not HTTP, HttpParserUpgrade after CONNECT."""
        rest = memoryview(data)
        while (end := self._feed(rest)) is not None:
            rest = rest[end:]
            head = self._head_without_offer()
            self._reset()
            super().feed_data(head)

    def _feed(self, data: memoryview) -> int | None:
        """The end of the first head with an offer; None if there is none."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.offers_upgrade:
                raise
            return int(upgrade.args[0])
        return None

    def _head_without_offer(self) -> bytes:
        """Without `Upgrade`, the mention of it in `Connection` has no meaning."""
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, version)]
        lines += [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
