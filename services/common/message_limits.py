"""How large a message between services may be, and how much of them waits unread."""

MAX_MESSAGE_BYTES = 64 * 2**20

LOOKAHEAD_BYTES = 65_535
"""Of each stream a peer sends so much ahead of what is read, where no other number is given."""
