"""The parser of requests, for a server that switches to no other protocol.

A client may offer to (`Upgrade`, RFC 9110 7.8), as the JDK's client and `curl --http2` do, and a server may
ignore it. httptools cannot: it takes the offer for accepted, so that the request has no body and what follows
the head is of the other protocol. Hence the head of such a request is parsed again, without the offer.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools


class Head(Protocol):
    """What a protocol keeps of the request that is being parsed."""

    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser(httptools.HttpRequestParser):
    """httptools' own, which says `offers_upgrade` in callbacks that are to be ignored: they come again."""

    def __init__(self, protocol: Head) -> None:
        self._protocol = protocol
        self._reset()

    def _reset(self) -> None:
        """To the state of a new one."""
        super().__init__(self._protocol)
        # As uvicorn sets it: the first of several requests is answered, also when it closes the connection.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    @property
    def offers_upgrade(self) -> bool:
        """Whether the request whose head is complete will be parsed again. CONNECT is no offer."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        """Raises HttpParserError for what is no HTTP, HttpParserUpgrade after CONNECT."""
        rest = memoryview(data)
        while (end := self._feed(rest)) is not None:
            rest = rest[end:]
            head = self._head_without_offer()
            self._reset()
            super().feed_data(head)

    def _feed(self, data: memoryview) -> int | None:
        """The end of the first head that makes an offer; None where there is none."""
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.offers_upgrade:
                raise
            return int(upgrade.args[0])
        return None

    def _head_without_offer(self) -> bytes:
        """Without `Upgrade` what `Connection` says of it means nothing."""
        version = self.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.get_method(), self._protocol.url, version)]
        lines += [b"%s: %s" % header for header in self._protocol.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])
