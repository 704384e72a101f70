"""Acceptance rules: one file for each way to decide on draft tokens."""
