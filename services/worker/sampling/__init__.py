"""Sampling tokens from logits: parameters, edits, filters, random numbers, log-probabilities."""
