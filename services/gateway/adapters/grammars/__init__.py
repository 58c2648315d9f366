"""Grammars that the gateway writes: forced calls, structural tags, what follows reasoning."""
