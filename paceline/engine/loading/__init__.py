"""From a checkpoint to a runner: files, weights, the check against transformers, cache size."""
