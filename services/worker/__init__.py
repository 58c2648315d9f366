"""The worker: weights, KV cache, attention and sampling of one rank of a model.

Sets environment variables of OpenMP and OpenBLAS before these libraries are loaded, because they
read the variables only then. By default, waiting OpenMP threads spin. Spinning makes steps up to
ten times as long if a gateway, a scheduler and a pool run on the same processors, and saves nothing
if the worker runs alone. NumPy's OpenBLAS gets one thread. By default it would start one for each
processor, although the worker uses none of them.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
