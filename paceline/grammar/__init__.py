"""Structured outputs: which tokens may come next so that the text keeps to its form. No torch in here.

The library behind it is llguidance (docs/decisions/0023). `Grammars` belongs to a tokenizer and compiles what
requests ask for; a `GrammarState` belongs to one sequence and gives masks.
"""

from paceline.grammar.compiler import Grammars
from paceline.grammar.state import GrammarState, Mask

__all__ = ["GrammarState", "Grammars", "Mask"]
