"""The number of parts into which the keys of an attention call are split."""

MOST_SPLITS = 32
FEWEST_KEYS_PER_SPLIT = 256
ENOUGH_PROGRAMS = 256


def num_splits(num_lanes: int, num_kv_heads: int, num_keys: int, num_processors: int) -> int:
    """The number of parts into which a lane's keys are split, so that every processor has work.

    The smallest power of two that makes two programs for each processor, as far as there are enough
    keys. `num_keys` are those of a whole table, not of a sequence. The scratch memory of a call
    grows with the number; with xFormers' own choice it can take gigabytes.
    """
    programs, splits = num_lanes * num_kv_heads, 1
    if programs >= ENOUGH_PROGRAMS:
        return 1
    while (
        splits < MOST_SPLITS
        and programs * splits < 2 * num_processors
        and num_keys >= 2 * splits * FEWEST_KEYS_PER_SPLIT
    ):
        splits *= 2
    return splits
