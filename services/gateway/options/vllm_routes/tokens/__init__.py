"""vLLM's routes with tokens as input and output."""
