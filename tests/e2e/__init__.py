"""Tests of all services together. A package: the stacks that they share end with its last test."""
