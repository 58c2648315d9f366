"""Compares the times that clients of a simulated device measure with the device's profile."""
