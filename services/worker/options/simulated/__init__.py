"""The simulated device: a worker without a model, whose steps take the time that a profile says."""

from services.worker.options.simulated.platform import select_simulated

__all__ = ["select_simulated"]
