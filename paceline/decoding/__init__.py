"""The mathematics of speculative decoding as pure functions on tensors."""
