"""The round of one sequence: a state machine without I/O, clock or randomness."""
