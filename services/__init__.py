"""The services and what they share. Imported before any of them, and so before grpc."""

import os

from services.common.rpc.grpc_core import tune_grpc

tune_grpc(os.environ)
