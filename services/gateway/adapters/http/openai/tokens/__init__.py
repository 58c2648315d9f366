"""vLLM's route of tokens in and tokens out."""
