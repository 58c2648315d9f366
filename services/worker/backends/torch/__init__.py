"""Plain torch, on every device. The other backends fall back on it, and are tested against it."""
