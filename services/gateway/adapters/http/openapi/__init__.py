"""The OpenAPI documents: what a route takes, and everything that it may answer."""
