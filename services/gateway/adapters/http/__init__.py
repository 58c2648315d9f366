"""The gateway's HTTP APIs: OpenAI's API with vLLM's common extensions, and Anthropic's API."""
