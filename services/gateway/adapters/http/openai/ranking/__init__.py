"""vLLM's routes of models that pool prompts: rerank, classify and pooling."""
