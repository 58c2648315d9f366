"""Tests of all services together, as a package whose shared stacks end after its last test."""
