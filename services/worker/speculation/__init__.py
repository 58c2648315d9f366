"""Speculation: draft tokens, which a step verifies in addition to computing the next token."""
