"""Anthropic's messages API: request bodies, their conversion, answers, and events of streams."""
