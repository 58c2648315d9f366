"""Seeds of the n answers of one request."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def child_seed(seed: int, child: int) -> int:
    """The seed of answer number `child`, in [0, 2**64).

    The first answer has the seed itself, so that n = 1 and the first of n agree. The others are
    outputs of SplitMix64 (Steele, Lea and Flood, 2014), which never meet for one seed.
    """
    if child == 0:
        return seed & _MASK
    mixed = (seed + child * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
