"""Readers of models' tool-call formats. A reader reads an answer up to the answer's end."""
