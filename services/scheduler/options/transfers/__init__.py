"""Transfers of keys and values. The KV connector of this option offloads blocks to host memory."""

from services.scheduler.options.transfers.option import OffloadedBlocks

__all__ = ["OffloadedBlocks"]
