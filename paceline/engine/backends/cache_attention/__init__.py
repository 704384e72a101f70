"""The attention of a pass over a paged cache, by one of several implementations.

`gathered` is the reference and runs everywhere. `varlen` reads the blocks where they lie, on CUDA.
"""
