"""`python -m benchmarks.peers --link LINK [OPTION]...`: see benchmarks/peers/sweep.py."""

import os
import sys
from importlib import import_module

from services.common.rpc.grpc_core import silence_grpc

if __name__ == "__main__":
    # grpc reads this when it is imported. Lost connections are expected.
    silence_grpc(os.environ)
    sys.exit(import_module("benchmarks.peers.sweep").main(sys.argv[1:]))
