"""Choosing K, the number of draft tokens of a round: by measured goodput, by a table, or fixed.

policy.py is what a round asks; controller.py decides for all sequences that share the workers; cost_model.py
holds the seconds of a round, expected_tokens.py its tokens, and exploration.py says when another K is tried.
"""
