"""Finds models in a directory, under a name of the Hugging Face hub, or in a GGUF file."""
