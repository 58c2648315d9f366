"""The load generator's core, which contains loads, loops and figures, but no network code."""
