"""The `paceline` command."""

from paceline.cli.app import main

__all__ = ["main"]
