"""Grammars that the gateway writes: forced calls, structural tags, answers after reasoning."""
