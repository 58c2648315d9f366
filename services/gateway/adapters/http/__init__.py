"""OpenAI's API over HTTP, with vLLM's common extras."""
