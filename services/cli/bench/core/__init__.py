"""The load generator's core, without a network: loads, loops, figures."""
