"""The compile process of a server. It loads the tokenizer and forks for each structure.

A fork has limits on processor time and memory, enforced by the operating system even inside the library, and
leaves nothing behind. The process ends with its server, which holds the other end of its standard input, a
Unix socket. Frames in both directions:

    4 bytes, little endian: the length of the header; 4 bytes: the length of the tail
    header: a JSON object      tail: bytes

    {"do": "load", "vocabulary_size": V, "eos_token_ids": […], "has_tokenizer": bool}   tail: tokenizer.json
    {"do": "check", "id": N, "structure": {…}}
    {"do": "follow", "id": N, "structure": {…}, "lengths": […]}      tail: texts, 4 bytes for each token
    {"do": "give up", "id": N}

Answers to `check` and `follow` have `id` and one of: `kept` (true or false), `field` and `reason` (an invalid
structure), `over` ("time" or "memory": a limit was exceeded), `killed` (the fork was cancelled or killed) or
`broken` (the library failed). At most one request is in progress: the server waits for the answer or cancels
the request before it sends the next one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from paceline.core import limits
from paceline.core.errors import InvalidArgumentError
from paceline.core.structured import StructuredOutputs
from paceline.grammar.compiler import Grammars

HEADER: Final = struct.Struct("<II")
TOKEN: Final = "I"  # noqa: S105 - not a secret
"""Array code of a token id."""
_CHUNK = 1 << 18
_NICENESS = 5
"""Slow structures give way to models; normal ones take only milliseconds."""
_FIRST = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "integer"}}})
_TIME_SIGNALS = (signal.SIGPROF, signal.SIGXCPU)
_MEMORY_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end native code without memory or stack."""


def frame(header: dict[str, Any], tail: bytes = b"") -> bytes:
    """Encode a message."""
    text = json.dumps(header).encode()
    return HEADER.pack(len(text), len(tail)) + text + tail


class _Parent:
    """Handles the server's requests on one thread without blocking, so that the server's end is noticed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._received = bytearray()
        self._grammars: Grammars | None = None
        self._fork: tuple[int, int, int] | None = None
        """Id of the request, process id, and the pipe of its answer."""
        self._answer = bytearray()

    def serve(self) -> None:
        """Run until the server closes the socket."""
        try:
            while True:
                watched = [self._control.fileno()] + ([] if self._fork is None else [self._fork[2]])
                ready, _, _ = select.select(watched, [], [])
                if self._control.fileno() in ready:
                    data = self._control.recv(_CHUNK)
                    if not data:
                        return
                    self._received += data
                    for header, tail in self._frames():
                        self._take(header, tail)
                if self._fork is not None and self._fork[2] in ready:
                    self._read_answer(self._fork)
        except ConnectionError:
            return
        finally:
            self._end_fork()

    def _frames(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        while len(self._received) >= HEADER.size:
            length, tail = HEADER.unpack_from(self._received)
            end = HEADER.size + length + tail
            if len(self._received) < end:
                return
            message = bytes(memoryview(self._received)[HEADER.size : end])
            del self._received[:end]
            yield json.loads(message[:length]), message[length:]

    def _take(self, header: dict[str, Any], tail: bytes) -> None:
        match header["do"]:
            case "load":
                tokenizer = tail.decode() if header["has_tokenizer"] else None
                self._grammars = Grammars(tokenizer, header["vocabulary_size"], header["eos_token_ids"])
                with contextlib.suppress(InvalidArgumentError):
                    # Warm-up, so that forks need not repeat one-time work.
                    self._grammars.check(_FIRST)
                gc.collect()
                gc.freeze()  # a collection in a fork would copy shared memory pages
            case "give up":
                if self._fork is not None and self._fork[0] == header["id"]:
                    self._end_fork()
                    self._tell({"id": header["id"], "killed": True})
            case _:
                self._begin(header, tail)

    def _begin(self, header: dict[str, Any], tail: bytes) -> None:
        assert self._fork is None
        assert self._grammars is not None
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            os.close(reading)
            _work(self._grammars, header, tail, writing)
        os.close(writing)
        self._answer.clear()
        self._fork = header["id"], pid, reading

    def _read_answer(self, fork: tuple[int, int, int]) -> None:
        request, pid, pipe = fork
        data = os.read(pipe, _CHUNK)
        if data:
            self._answer += data
            return
        self._fork = None
        os.close(pipe)
        _, status = os.waitpid(pid, 0)
        self._tell({"id": request, **_outcome(status, bytes(self._answer))})

    def _end_fork(self) -> None:
        if self._fork is not None:
            _, pid, pipe = self._fork
            self._fork = None
            os.close(pipe)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _tell(self, header: dict[str, Any]) -> None:
        self._control.sendall(frame(header))


def _outcome(status: int, answer: bytes) -> dict[str, Any]:
    """The answer of an ended fork, or the reason of its end."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(answer)
            return found
    if -code in _TIME_SIGNALS:
        return {"over": "time"}
    if -code in _MEMORY_SIGNALS:
        return {"over": "memory"}
    return {"killed": True} if code < 0 else {"broken": f"exit code {code}"}


def _work(grammars: Grammars, header: dict[str, Any], tail: bytes, pipe: int) -> NoReturn:
    """The work of a fork."""
    try:
        seconds = limits.MAX_STRUCTURE_SECONDS
        if header["do"] == "follow":
            seconds += limits.MAX_FOLLOW_SECONDS
        _set_limits(seconds)
        try:
            answer = _find(grammars, header, tail)
        except InvalidArgumentError as error:
            answer = {"field": error.field, "reason": error.description}
        except MemoryError:
            answer = {"over": "memory"}
        except BaseException as error:  # the library's panics are not subclasses of Exception
            answer = {"broken": type(error).__name__}
        with open(pipe, "wb") as out:
            out.write(json.dumps(answer).encode())
        os._exit(0)
    finally:
        os._exit(1)


def _find(grammars: Grammars, header: dict[str, Any], tail: bytes) -> dict[str, Any]:
    wanted = StructuredOutputs.from_mapping(header["structure"])
    if header["do"] == "check":
        grammars.check(wanted)
        return {"kept": True}
    tokens = array(TOKEN)
    tokens.frombytes(tail)
    state = grammars.alone(wanted)
    until = state.clock() + limits.MAX_FOLLOW_SECONDS
    start = 0
    for length in header["lengths"]:
        if not state.follows(tokens[start : start + length], until):
            return {"kept": False}
        start += length
    return {"kept": True}


def _set_limits(seconds: float) -> None:
    """Limit processor time and additional memory, as far as the system supports it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # hides the library's crash output
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with contextlib.suppress(OSError, ValueError):
        most = math.ceil(seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.MAX_STRUCTURE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> None:
    """Serve the process at the other end of standard input."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # If memory runs out, the system should kill this process, which is easily replaced.
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _Parent(socket.socket(fileno=os.dup(0))).serve()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
