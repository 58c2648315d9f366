"""OpenAI's responses API: request bodies, their conversion, answers, and events of streams."""
