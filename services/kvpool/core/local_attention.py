"""Attention that looks back no further than a window or the beginning of a chunk."""

from services.kvpool.core.group_manager import GroupManager


class LocalAttentionManager(GroupManager):
    """A request holds the blocks in sight and those being computed.

    In a sliding window a query sees its own token and the `window - 1` before it: a hit needs only
    the last `window - 1` tokens' worth of blocks, all that the next query sees of the past.
    In chunked local attention positions are cut into chunks of `window` tokens, and a query sees
    the tokens of its own: blocks before a chunk's beginning are a hit without being looked up,
    since no later query reads them.
    """

    __slots__ = ()

    @property
    def frees_early(self) -> bool:
        """True: as soon as no later query can see them."""
        return True
