"""What the load generator meets: HTTP, the clock, tokenizers, the terminal, files."""
