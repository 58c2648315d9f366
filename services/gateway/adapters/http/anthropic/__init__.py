"""Anthropic's messages API: bodies, conversion to requests, answers and their events."""
