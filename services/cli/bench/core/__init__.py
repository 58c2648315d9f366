"""The load generator's core: loads, loops and metrics, without network code."""
