"""Readers of models' tool-call formats. Each reads an answer to its end."""
