"""What a worker keeps of one sequence's past: cache entries, and which of them others may reuse."""
