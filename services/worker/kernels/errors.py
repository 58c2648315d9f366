"""What can be wrong with kernels."""

from services.common.errors import StepwellError


class KernelsUnavailable(StepwellError):
    """Compiled kernels were asked for by name, and there are none here."""

    reason = "KERNELS_UNAVAILABLE"
