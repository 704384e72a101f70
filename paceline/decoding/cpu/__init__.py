"""Compiled functions for a CPU, and the machine code that is kept of them on disk."""
