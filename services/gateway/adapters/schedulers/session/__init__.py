"""The messages of a session with one scheduler: how they are numbered, written and checked."""
