"""Parts of the worker that not every replica needs. `listed.py` has the list."""
