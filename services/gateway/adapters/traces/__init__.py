"""The trace store: spans are received by OTLP and returned as JSON."""
