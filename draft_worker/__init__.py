"""The draft worker: proposes tokens with a small model and its own KV cache."""
