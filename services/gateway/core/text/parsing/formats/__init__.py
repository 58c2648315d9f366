"""Readers of models' tool-call formats. A reader reads an answer to its end."""
