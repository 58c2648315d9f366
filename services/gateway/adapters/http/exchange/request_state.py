"""Keys of the state that goes with an HTTP request through the gateway."""

ARRIVED = "arrived"
"""When it was to be served, in nanoseconds of `time.perf_counter_ns`."""
HEADERS = "headers"
"""Its headers by their lower-case names, where they were read."""
ARRIVAL = "arrival"
"""The Arrival of a request that has room, and was counted by its headers."""
CLIENT = "client"
"""The Client that sent the request."""
BODY_WRITER = "body_writer"
"""The BodyWriter of an answer with chunks, which writes past what wraps `send`. Middlewares change
the start of an answer and nothing else.
"""
