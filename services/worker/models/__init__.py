"""Models from Hugging Face directories: reading, checking and running them."""
