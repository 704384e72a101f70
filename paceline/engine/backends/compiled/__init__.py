"""A model's pass as one compiled function: float32 on a CPU, one thread, rows that never affect each other.

kernels.py has the function, gemm.py, tiles.py and vectors.py its products, weights.py what it takes of a
model, flat_rows.py what it takes of a layout; chain.py runs it several times over, each time with what it
chose before.
"""

from paceline.engine.backends.compiled.backend import CompiledBackend, compiled_backend

__all__ = ["CompiledBackend", "compiled_backend"]
