"""What a worker uses of its machine: a backend, memory and processors."""
