"""From a model's text to what it means: content, reasoning, calls of tools, as the text comes."""
