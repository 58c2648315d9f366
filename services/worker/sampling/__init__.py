"""From logits to tokens: parameters, edits, filters, random numbers, log-probabilities."""
