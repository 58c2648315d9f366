"""The gateway, `python -m services.gateway`: its composition root."""

import asyncio
import gc
import logging
import os
import sys

from services.common.lifecycle import run_service
from services.common.telemetry import service_tracing
from services.gateway.adapters.hf_tokenizer import load_tokenizer
from services.gateway.adapters.memory import give_memory_back
from services.gateway.gateway import Gateway
from services.gateway.settings import GatewaySettings

SERVICE = "gateway"

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves until SIGTERM."""
    # No model is built here: transformers shall not spend seconds and memory on a torch that it
    # finds installed beside it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    # numpy comes with it, and would start a thread for every processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    run_service(SERVICE, GatewaySettings, serve)


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains."""
    give_memory_back()
    with service_tracing(SERVICE, settings) as tracing:
        gateway = Gateway(settings, load_tokenizer(settings.model), tracing)
        # What was loaded stays: a full collection that walks through it would hold up the event
        # loop.
        gc.collect()
        gc.freeze()
        addresses = await gateway.start()
        logger.info(
            "serving %s: HTTP on %s, gRPC on %s",
            settings.model_name,
            addresses.http,
            addresses.grpc,
        )
        await gateway.serve_until(stop)


if __name__ == "__main__":
    main()
