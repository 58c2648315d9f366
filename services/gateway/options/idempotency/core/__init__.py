"""Stored answers, and how gateways share them."""
