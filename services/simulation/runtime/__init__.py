"""Runs services in one process, in virtual time: the same seed gives the same run."""
