"""Why a group of ranks cannot work, or go on.

Unavailable
└── GroupBroken          the ranks cannot go on together; each of them ends
    └── RankLost         one of them is gone
"""

from services.common.errors import Unavailable


class GroupBroken(Unavailable):
    """The ranks of a group cannot go on together; the message says why. The process is to end."""

    reason = "GROUP_BROKEN"


class RankLost(GroupBroken):
    """A peer's process has ended, or cannot be reached any more."""

    reason = "RANK_LOST"
