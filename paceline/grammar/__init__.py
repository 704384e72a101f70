"""Structured outputs: masks of the tokens that keep a text in its required format. Does not use torch.

Built on llguidance (docs/decisions/0023). `Grammars` belongs to a tokenizer and compiles structures; a
`GrammarState` belongs to one sequence and computes masks.
"""

from paceline.grammar.compiler import Grammars
from paceline.grammar.state import GrammarState, Mask

__all__ = ["GrammarState", "Grammars", "Mask"]
