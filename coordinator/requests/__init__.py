"""Requests: their sequences, their readers, and requests held for a client that may resume."""
