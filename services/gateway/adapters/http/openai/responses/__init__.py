"""OpenAI's responses: bodies, the requests that they ask for, answers and their events."""
