"""`stepwell doctor`: reports what this machine has, which kernels are used and why, the machine's
measured limits, and the share of the limits that a short run of a model reaches.
"""

from services.cli.doctor.command import main

__all__ = ["main"]
