"""OpenAI's responses API: bodies, conversion to requests, answers and their events."""
