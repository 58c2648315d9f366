"""What a worker takes from the machine it runs on: a backend, memory and processors."""
