"""Seeds of the answers to one request. A request has `n` answers to each of its prompts."""

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def answer_seed(given: int | None, drawn: int, prompt: int, child: int, n: int) -> int:
    """The seed in [0, 2**64) of answer `child` of `n` to prompt number `prompt`. `given` is the
    client's seed. Each prompt uses it as if the prompt had been sent alone, so equal prompts have
    equal answers, as in vLLM. Without a client's seed, the random number `drawn` is used, and all
    answers of the request have different seeds.
    """
    if given is not None:
        return child_seed(given, child)
    return child_seed(drawn, prompt * n + child)


def child_seed(seed: int, child: int) -> int:
    """The seed of answer number `child` among the answers that are derived from `seed`. The first
    answer has the seed itself. The other seeds are outputs of SplitMix64 (Steele, Lea and Flood,
    2014), which differ for all answers. vLLM adds the answer's number to the seed instead, so that
    requests with neighbouring seeds have common answers.
    """
    if child == 0:
        return seed & _MASK
    mixed = (seed + child * _GOLDEN) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
