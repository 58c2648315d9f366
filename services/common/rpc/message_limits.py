"""Limits on the size of messages between services, and on the number of unread bytes."""

MAX_MESSAGE_BYTES = 64 * 2**20

LOOKAHEAD_BYTES = 65_535
"""Default number of bytes that a peer may send on a stream before they are read."""
