"""The operations that a decoder is made of: an interface, and what implements it."""
