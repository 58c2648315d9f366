"""The worker: weights, KV cache, attention and sampling of one rank of one model.

OpenMP and OpenBLAS read these environment variables when they are loaded, so this package is
imported first. Waiting OpenMP threads spin by default. If a gateway, a scheduler and a pool run on
the same processors, spinning makes steps up to ten times as long. If the worker runs alone,
spinning saves nothing. NumPy's OpenBLAS starts a thread for every processor, and none of these is
used.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
