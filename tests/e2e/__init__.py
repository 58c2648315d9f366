"""Tests of all services together. They form a package, whose shared stacks of services end after
its last test.
"""
