"""How large a message between services may be, and how much of them waits unread."""

MAX_MESSAGE_BYTES = 64 * 2**20

LOOKAHEAD_BYTES = 65_535
"""Bytes of a stream that a peer may send before they are read, unless another bound is given."""
