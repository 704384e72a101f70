"""A model's pass as one compiled function: float32 on a CPU, one thread, row-invariant.

kernels.py has the function; gemm.py, tiles.py and vectors.py its products. weights.py lays out a model's
weights, flat_rows.py a pass's rows. chain.py runs the function several times, each time with the token chosen
before.
"""

from paceline.engine.backends.compiled.backend import CompiledBackend, compiled_backend

__all__ = ["CompiledBackend", "compiled_backend"]
