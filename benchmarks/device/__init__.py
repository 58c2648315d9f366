"""Compares the times that clients of a simulated device see with its profile."""
