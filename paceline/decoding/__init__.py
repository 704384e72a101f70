"""The mathematics of speculative decoding as pure functions on tensors; see docs of each module."""
