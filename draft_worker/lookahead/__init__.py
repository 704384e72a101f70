"""Drafts ahead of verdicts and rounds: branches for likely outcomes, and prompts before the first round."""
