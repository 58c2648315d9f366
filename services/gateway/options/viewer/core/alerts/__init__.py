"""Evaluates Prometheus' alert rules over samples of the metrics of a gateway and its replicas."""
