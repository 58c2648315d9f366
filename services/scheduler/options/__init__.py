"""Parts of the scheduler that not every replica needs. `listed.py` has the list."""
