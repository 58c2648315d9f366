"""The load generator's adapters: HTTP, the clock, tokenizers, the terminal, files."""
