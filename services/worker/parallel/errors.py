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
