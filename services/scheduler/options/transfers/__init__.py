"""Transfers of keys and values to and from host memory, through a KV connector."""

from services.scheduler.options.transfers.option import OffloadedBlocks

__all__ = ["OffloadedBlocks"]
