"""The gateway's logic. It keeps the prompts, parameters and delivered tokens of requests, and
converts tokens to text.
"""
