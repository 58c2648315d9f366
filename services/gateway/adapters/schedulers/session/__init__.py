"""The messages of a session with one scheduler: their numbers, and checks of received ones."""
