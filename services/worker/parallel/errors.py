"""Errors of groups of ranks.

Unavailable
└── GroupBroken          the ranks cannot continue, so all of them end
    └── RankLost         the process of a rank has ended
        └── RankStopped  a rank received a stop signal
"""

from services.common.errors import Unavailable


class GroupBroken(Unavailable):
    """The ranks cannot continue together, and all of them end. The message has the reason."""

    reason = "GROUP_BROKEN"


class RankLost(GroupBroken):
    """The process of another rank has ended, or cannot be reached."""

    reason = "RANK_LOST"


class RankStopped(RankLost):
    """Another rank received a stop signal. Usually all ranks receive one, one after another."""

    reason = "RANK_STOPPED"


STOPPED = "it was told to stop"
"""The reason that a rank sends before it ends because of a stop signal."""


def rank_ended(rank: int, reason: str) -> RankLost:
    """The error after another rank has ended. `reason` is empty if the rank has not sent one. It
    ends with STOPPED if that rank, or a rank because of which it ended, received a stop signal.
    """
    kind = RankStopped if reason.endswith(STOPPED) else RankLost
    return kind(f"rank {rank} has ended: {reason}" if reason else f"rank {rank} has ended")
