"""The pool service's adapters: gRPC, metrics, spans, and the directories of cached prefixes."""
