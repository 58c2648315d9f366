"""The store of traces: spans come in by OTLP, and are read as JSON."""
