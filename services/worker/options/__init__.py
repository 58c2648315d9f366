"""Optional features of the worker, which not every replica needs. `listed.py` lists them."""
