"""Tests of all services together. This is a package, so that the shared stacks end with its last
test.
"""
