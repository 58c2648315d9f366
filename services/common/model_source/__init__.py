"""Finds models: in a directory, under a name of the hub, or in a GGUF file."""
