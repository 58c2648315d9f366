"""Optional parts of the worker, which not every replica needs. `listed.py` has the list."""
