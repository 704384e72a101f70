"""The sampling parameters of a batch of rows, and what came before each row."""
