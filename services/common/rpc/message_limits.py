"""Limits on the size of messages between services, and on the number of unread bytes."""

MAX_MESSAGE_BYTES = 64 * 2**20

LOOKAHEAD_BYTES = 65_535
"""Default limit on the bytes that a peer has sent on a stream and that are not read yet."""
