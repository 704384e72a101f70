"""The `paceline` command."""

from paceline.cli.environment import prepare

prepare()

from paceline.cli.app import main  # noqa: E402

__all__ = ["main"]
