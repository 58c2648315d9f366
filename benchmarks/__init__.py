"""Measurements: every number the project quotes comes from a program here."""
