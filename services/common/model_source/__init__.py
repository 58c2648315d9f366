"""Where a model is found: a directory, a name of the hub, or a GGUF file."""
