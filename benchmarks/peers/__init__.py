"""Tests how services handle wrong messages from each other: a proxy on a link, and a sweep of
faults.
"""
