"""Tests of all services together. They are a package, so that the shared stacks end after its last
test.
"""
