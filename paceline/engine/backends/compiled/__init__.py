"""A model's pass as one compiled function: float32 on a CPU, one thread, rows that never affect each other.

kernels.py has the function, gemm.py, tiles.py and vectors.py its products, weights.py what it takes of a
model, layout.py what it takes of a batch; chain.py runs it several times over, each time with what it chose
before.
"""

from paceline.engine.backends.compiled.forward import CompiledForward, compiled_forward
from paceline.engine.backends.compiled.layout import Layout

__all__ = ["CompiledForward", "Layout", "compiled_forward"]
