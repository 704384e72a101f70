"""Which work the next pass does: sequences, sessions, planning, preemption, the engine thread."""
