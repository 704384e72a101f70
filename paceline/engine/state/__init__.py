"""A worker's cached state of one sequence, and the parts that other sequences may reuse."""
