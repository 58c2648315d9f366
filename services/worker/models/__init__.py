"""Models from Hugging Face directories: reading them, checking them, running them."""
