"""Runs services in one process, in virtual time. The same seed gives the same run."""
