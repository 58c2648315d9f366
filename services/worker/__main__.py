"""The entry point of the worker, started by `python -m services.worker`.

Settings and model are checked before torch is imported, because the import takes seconds.
"""

import gc
import signal

if __name__ == "__main__":
    gc.disable()  # until run_service has frozen the imported objects
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the event loop handles SIGINT

import asyncio
import logging
import os
from importlib import import_module

from services.common.process.lifecycle import run_service
from services.common.telemetry.tracing import service_tracing
from services.common.tls.settings import tls_of
from services.worker.backends.choices import DeviceSetting
from services.worker.models.suitability.check import check_model
from services.worker.parallel.membership import find_membership
from services.worker.settings import WorkerSettings

SERVICE = "worker"

logger = logging.getLogger("services.worker")


def main() -> None:
    run_service(SERVICE, WorkerSettings, serve, prepare)


def prepare(settings: WorkerSettings) -> None:
    """Checks the model, then imports torch and the worker's other modules. Raises ModelError if the
    model cannot be served, and SettingError if the settings of the worker's ranks contradict each
    other.
    """
    own = find_membership(settings, os.environ)
    check_model(
        *(settings.model, own.tensor_parallel_size, own.pipeline_parallel_size, settings.runner),
        needs_weights=settings.device is not DeviceSetting.SIMULATED,
    )
    logger.info("this worker can serve the model %s; importing torch", settings.model)
    import_module("services.worker.service")


async def serve(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serves until `stop` is set, then drains. Raises SettingError if the settings of the worker's
    ranks contradict each other.

    If one of the ranks ends or fails, the process ends at once, because the compute thread may be
    waiting for that rank.
    """
    from services.worker.service import WorkerService  # noqa: PLC0415 - imports torch

    with service_tracing(SERVICE, settings) as tracing, tls_of(settings) as tls:
        service = WorkerService(settings, tracing, tls)
        try:
            await service.run(stop)
        finally:
            await service.close(stop)


if __name__ == "__main__":
    main()
