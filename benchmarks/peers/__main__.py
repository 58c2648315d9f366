"""`python -m benchmarks.peers --link LINK [OPTION]...`: see benchmarks/peers/sweep.py."""

import os
import sys
from importlib import import_module

from services.common.rpc.grpc_core import silence_grpc

if __name__ == "__main__":
    # Must precede the import of grpc, which reads the variable. Otherwise grpc would report lost
    # connections, which are expected here.
    silence_grpc(os.environ)
    sys.exit(import_module("benchmarks.peers.sweep").main(sys.argv[1:]))
