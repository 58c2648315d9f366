"""Seeds of the answers of one request, as many as its prompts times n."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def answer_seed(given: int | None, drawn: int, prompt: int, child: int, n: int) -> int:
    """The seed of answer number `child` of the `n` to prompt number `prompt`, in [0, 2**64).

    A client's seed holds for each prompt as if it were sent alone, so that equal prompts get equal
    answers, as they do in vLLM; of the n answers each has its own. Without one, `drawn` stands in,
    and every answer of the request has its own.
    """
    if given is not None:
        return child_seed(given, child)
    return child_seed(drawn, prompt * n + child)


def child_seed(seed: int, child: int) -> int:
    """The seed of answer number `child` of those that share a seed.

    The first answer has the seed itself, so that n = 1 and the first of n agree. The others are
    outputs of SplitMix64 (Steele, Lea and Flood, 2014), which never meet for one seed. vLLM adds
    the child's number to the seed, so that neighbouring seeds share answers.
    """
    if child == 0:
        return seed & _MASK
    mixed = (seed + child * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
