"""Chooses K, the number of draft tokens of a round: by measured goodput, by a table, or fixed.

policy.py is the interface for a round. controller.py decides for all sequences that share the workers.
cost_model.py estimates the seconds of a round, expected_tokens.py its tokens, and exploration.py schedules
trials of another K.
"""
