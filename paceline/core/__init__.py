"""Types, messages, errors, limits and configuration of every process. Standard library only."""
