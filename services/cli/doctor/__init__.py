"""`stepwell doctor`: what this machine has, which kernels it computes with and why, its measured
limits, and the share of the limits that a short run of a model reaches.
"""

from services.cli.doctor.command import main

__all__ = ["main"]
