"""Checks of a model directory that read only its files. No module here imports torch."""
