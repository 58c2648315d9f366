"""Tests of all services together. They form a Python package, so that shared stacks end after the
package's last test.
"""
