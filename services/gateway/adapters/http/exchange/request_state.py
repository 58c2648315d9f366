"""Keys of an HTTP request's state in its ASGI scope."""

ARRIVED = "arrived"
"""Arrival time of the request, in nanoseconds of `time.perf_counter_ns`."""
HEADERS = "headers"
"""A map from lower-case header names to values. The key is absent until `headers_of` is called."""
ARRIVAL = "arrival"
"""The Arrival that counts the request as arriving, if the request was admitted before its body was
read.
"""
HELD_BODY = "held_body"
"""The asynchronous context manager that holds the budget for the bytes of the body, if the body was
read before the application ran.
"""
HAS_MODEL_PATH = "has_model_path"
"""Set if the path that the client sent began with the model's name."""
CLIENT = "client"
BODY_WRITER = "body_writer"
"""The BodyWriter of the connection, for chunked answers. It may bypass the middlewares that wrap
`send`, because they change only the status and the headers of an answer.
"""
