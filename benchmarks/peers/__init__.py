"""Tests how services handle wrong messages from each other. A proxy on a link between two services
injects one fault after another.
"""
