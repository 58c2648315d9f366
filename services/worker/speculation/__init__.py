"""Speculation: draft tokens are proposed, and a step verifies them along with the next token."""
