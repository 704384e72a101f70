"""Text and tokens: the vocabulary, incremental detokenisation, compiled structures."""
