"""Plain torch, on every device. Other backends fall back to it, and are tested against it."""
