"""Runs a Hugging Face decoder on a paged KV cache with ragged batches."""
