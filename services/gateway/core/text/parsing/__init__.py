"""Parses a model's text incrementally into content, reasoning and tool calls."""
