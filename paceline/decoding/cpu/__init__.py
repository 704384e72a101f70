"""Compiled functions for a CPU, and their machine code cached on disk."""
