"""Text and tokens: the vocabulary, incremental detokenising, compiled structures."""
