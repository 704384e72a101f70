"""Requests: a sequence for each choice, who reads them, and which are held for a client that may resume."""
