"""The trace store. Spans are received over OTLP and returned as JSON."""
