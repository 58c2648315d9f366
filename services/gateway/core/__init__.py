"""The state of requests: prompts, parameters and delivered tokens; and the
conversion of tokens to text.
"""
