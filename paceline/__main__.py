"""The process of the `paceline` command, also as `python -m paceline`.

Loading the command takes a second. Ctrl-C ends the process meanwhile without a word, as it has done nothing
yet; so all that is loaded is loaded behind the handler that does so.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code, as a shell has it for what SIGINT ended."""


def main() -> None:
    """Run one command and exit the process."""
    # A background job of a shell ignores SIGINT, and goes on doing so.
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:
        signal.signal(signal.SIGINT, lambda _number, _frame: os._exit(INTERRUPTED))
    from paceline.cli import main as command

    try:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command()
    except KeyboardInterrupt:
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
