"""Errors of groups of ranks.

Unavailable
└── GroupBroken          the ranks cannot go on together; each of them ends
    └── RankLost         one of them is gone
        └── RankStopped  because it was told to stop
"""

from services.common.errors import Unavailable


class GroupBroken(Unavailable):
    """The ranks of a group cannot go on together, for the reason in the message. The process must
    end.
    """

    reason = "GROUP_BROKEN"


class RankLost(GroupBroken):
    """The process of another rank has ended, or cannot be reached."""

    reason = "RANK_LOST"


class RankStopped(RankLost):
    """The process of another rank was told to stop. As a rule all ranks are, one after another."""

    reason = "RANK_STOPPED"
