"""Tests of all services. They are a package, so that shared stacks end after the last test."""
