"""Backends for a pass: through transformers, fused, compiled for a CPU, recorded on CUDA."""
