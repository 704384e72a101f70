"""The input of one branch, where it used to be found."""

from paceline.engine.layout import BranchInput

__all__ = ["BranchInput"]
