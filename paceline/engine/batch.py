"""The input of one sequence, where it used to be found."""

from paceline.engine.layout import SequenceInput

__all__ = ["SequenceInput"]
