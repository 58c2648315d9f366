"""Speculation: guesses of the tokens that follow, which a step verifies beside the next one."""
