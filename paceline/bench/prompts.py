"""Prompts of various lengths and kinds, written for the benchmark; none is training text."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.assets.tokenizer import load_tokenizer

PROMPTS = (
    "import os\n\n\ndef read_lines(path):\n    ",
    (
        'class Queue:\n    """A bounded first-in first-out queue."""\n\n'
        "    def __init__(self, maxsize=0):\n        "
    ),
    (
        '"""Helpers for paths."""\n\nimport os\nimport sys\n\n\ndef normalize(path):\n'
        '    """Return the path with its separators in order."""\n    if not path:\n        raise ValueError('
    ),
    "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_empty(self):\n        ",
    '''import heapq
import itertools


class PriorityQueue:
    """Entries leave in the order of their priority; equal ones in the order they came."""

    def __init__(self):
        self._heap = []
        self._counter = itertools.count()

    def push(self, item, priority=0):
        """Add an item."""
        heapq.heappush(self._heap, (priority, next(self._counter), item))

    def pop(self):
        """Remove the item of the lowest priority and return it."""
        if not self._heap:
            raise IndexError("pop from an empty queue")
        priority, count, item = heapq.heappop(self._heap)
        return item

    def __len__(self):
        return len(self._heap)

    def peek(self):
        ''',
    "def fibonacci(n):\n    a, b = 0, 1\n    for i in range(n):\n        ",
    (
        "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(description=__doc__)\n"
        "    parser.add_argument('-v', '--verbose', action='store_true',\n"
        "                        help='print more')\n    args = parser.parse_args()\n    "
    ),
    '''import socket
import threading


class EchoServer(threading.Thread):
    """Sends back whatever a client sends, one thread a client."""

    def __init__(self, host="127.0.0.1", port=0, backlog=5):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind((host, port))
        self.socket.listen(backlog)
        self.address = self.socket.getsockname()
        self.clients = []
        self.closed = threading.Event()

    def run(self):
        while not self.closed.is_set():
            try:
                connection, address = self.socket.accept()
            except OSError:
                break
            thread = threading.Thread(target=self.serve, args=(connection, address))
            self.clients.append(thread)
            thread.start()

    def serve(self, connection, address):
        """Answer one client until it hangs up."""
        with connection:
            while True:
                data = connection.recv(4096)
                ''',
)


def tokenized(model: str, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Token ids of each text, with the tokenizer's own special tokens. Raises InvalidArgumentError."""
    tokenizer = load_tokenizer(model, "target_model")
    return [tuple(tokenizer.encode(text).ids) for text in texts]
