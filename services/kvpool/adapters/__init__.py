"""The pool on the wire: gRPC, metrics, spans, and where its events go."""
