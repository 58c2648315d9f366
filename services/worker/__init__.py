"""The worker: weights, KV cache, attention and sampling of one rank of one model.

Imported before its modules, and so before OpenMP's and OpenBLAS's libraries, which read their
variables when they are loaded. Threads of OpenMP that wait spin by default: with a gateway, a
scheduler and a pool on the same processors that makes steps up to ten times as long, and alone on
them it gains nothing. OpenBLAS, of numpy, starts a thread for every processor, none of which is
used.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
