"""Chooses K, and chain or tree, for each round: by measured goodput, by a table, or fixed.

policy.py is the interface for a round. controller.py decides for all sequences that share the workers, among
the arms of arms.py. cost_model.py estimates the seconds of a round, expected_tokens.py the tokens of chains
and draft_trees.py those of trees, and exploration.py schedules trials of another arm.
"""
