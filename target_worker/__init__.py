"""The target worker: verifies proposals with the large model and its own KV cache."""
