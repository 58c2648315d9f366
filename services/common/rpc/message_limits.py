"""Limits on the size of messages between services, and on the number of unread bytes."""

MAX_MESSAGE_BYTES = 64 * 2**20

MAX_STEP_BYTES = 2**30
"""Limit on a message that sends an engine step to a worker. It is larger, because the message has
the prompts of all requests that the step admits, and clients determine how many these are.
"""

LOOKAHEAD_BYTES = 65_535
"""Default limit on the bytes that a peer has sent on a stream and that are not read yet."""
