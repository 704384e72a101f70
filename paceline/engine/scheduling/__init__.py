"""Decides the work of the next pass: sequences, sessions, planning, preemption, the engine thread."""
