"""What computes a model: the interfaces, and a package for each way of computing."""
