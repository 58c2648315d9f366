"""What travels in the session with one scheduler: numbered messages, and checks of what comes."""
