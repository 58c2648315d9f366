"""Anthropic's messages: bodies, the requests that they ask for, answers and their events."""
