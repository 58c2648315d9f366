"""Options: parts of the scheduler that only some replicas need. `listed.py` lists them."""
