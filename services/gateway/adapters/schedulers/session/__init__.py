"""The messages of a session with one scheduler: their numbers, and the checks of received
messages.
"""
