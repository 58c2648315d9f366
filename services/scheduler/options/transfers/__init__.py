"""Transfers of keys and values, with a connector to the workers' tier of offloaded blocks."""

from services.scheduler.options.transfers.option import OffloadedBlocks

__all__ = ["OffloadedBlocks"]
