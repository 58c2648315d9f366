"""The HTTP APIs of the gateway: OpenAI's with vLLM's common extensions, and Anthropic's."""
