"""Sampling parameters of a batch of rows, and the context before each row."""
