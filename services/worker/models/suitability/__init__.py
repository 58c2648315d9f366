"""Checks of a model directory by its files alone. Nothing here imports torch."""
