"""Requests that a client may send again under the same key, and that are computed once.

As the IETF draft "The Idempotency-Key HTTP Header Field" describes the key; here a request that is
sent again while the first one runs is not refused: it gets the same answer, from its beginning.
"""
