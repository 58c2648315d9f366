"""The services and their common code. This package is imported before grpc, so it tunes grpc."""

import os

from services.common.rpc.grpc_core import tune_grpc

tune_grpc(os.environ)
