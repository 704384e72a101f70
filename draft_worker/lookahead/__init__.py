"""Drafts ahead of verdicts and rounds: branches for likely outcomes, prompts before anybody asks."""
