"""Downloads a model from the Hugging Face hub into a volume, before the services start."""
