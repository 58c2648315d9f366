"""The worker: weights, KV cache, attention and sampling of one rank of a model.

This package is imported first, because OpenMP and OpenBLAS read these environment variables when
they are loaded. OpenMP threads that wait spin by default. Spinning makes steps up to ten times as
long if a gateway, a scheduler and a pool run on the same processors, and saves nothing if the
worker runs alone. NumPy's OpenBLAS would start a thread for each processor, although none is used.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
