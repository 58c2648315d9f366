"""Speculation. Draft tokens are proposed, and a step verifies them in addition to computing the
next token.
"""
