"""Stores of API keys: a file, or Redis."""
