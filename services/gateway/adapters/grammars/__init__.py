"""Grammars that the gateway writes. They force tool calls, implement structural tags, and constrain
answers after reasoning.
"""
