"""Keys of the state that goes with an HTTP request through the gateway."""

ARRIVED = "arrived"
"""When it was to be served, in nanoseconds of `time.perf_counter_ns`."""
ARRIVAL = "arrival"
"""The Arrival of a request that has room, and was counted by its headers."""
SEND_BODY = "send_body"
"""Sends parts of a body past what wraps `send`, which is each token's path. Middlewares change the
start of an answer and nothing else.
"""
