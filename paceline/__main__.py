"""Entry point of the `paceline` command and of `python -m paceline`.

Loading the command takes a second. Until then, Ctrl-C ends the process silently: the handler is installed
before any other import.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130
"""Exit code of shells for a process ended by SIGINT."""


def main() -> None:
    """Run one command and exit the process."""
    # A shell's background job ignores SIGINT and must continue to do so.
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
