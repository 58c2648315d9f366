"""Answers that are stored under keys, and shared between gateways."""
