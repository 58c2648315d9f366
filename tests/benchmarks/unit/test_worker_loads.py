"""The loads on which workers of several engines are compared, and the limits of the machine."""

import time

import pytest

from benchmarks.common.random_model import Shape
from benchmarks.worker.limits import Limits
from benchmarks.worker.loads import (
    LOADS,
    MAX_REQUESTS,
    MAX_TOKENS,
    NAMES,
    PREFILL,
    PREFIX,
    Prompts,
    Times,
    WrongTokens,
    decode_name,
    decode_rate,
    measure,
    warm_up,
)

VOCAB_SIZE = 5000


class Clockwork:
    """An engine that reports one second for every token."""

    def __init__(self, missing: int = 0) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self.prompts: list[Prompts] = []
        self._missing = missing

    def generate(self, prompts: Prompts, num_tokens: int) -> Times:
        self.asked.append((len(prompts), len(prompts[0]), num_tokens))
        self.prompts.append(prompts)
        return [[float(second) for second in range(num_tokens - self._missing)] for _ in prompts]


def once(engine: Clockwork, name: str) -> float:
    """The figure of a load that is measured once instead of repeatedly."""
    return measure(engine.generate, VOCAB_SIZE, name, 0, least_seconds=0)


def test_every_load_asks_for_what_its_name_says() -> None:
    engine = Clockwork()
    for name in NAMES:
        once(engine, name)
    decodes = [(level, 128, 64) for level in (1, 8, 32)]
    assert engine.asked == [(1, 512, 1), *decodes, (32, 416, 32)]
    assert max(requests for requests, _, _ in engine.asked) == MAX_REQUESTS
    assert max(count * (prompt + out) for count, prompt, out in engine.asked) == MAX_TOKENS


def test_prompts_are_the_same_for_all_engines_and_new_in_every_round() -> None:
    load = LOADS[decode_name(8)]
    assert load.prompts(VOCAB_SIZE, "round 1") == load.prompts(VOCAB_SIZE, "round 1")
    assert load.prompts(VOCAB_SIZE, "round 1") != load.prompts(VOCAB_SIZE, "round 2")


def test_prompts_share_what_they_should_and_nothing_else() -> None:
    prompts = LOADS[PREFIX].prompts(VOCAB_SIZE, "any")
    assert len({tuple(prompt[:384]) for prompt in prompts}) == 1
    assert len({tuple(prompt[384:]) for prompt in prompts}) == 32


def test_decoding_counts_from_where_all_have_their_first_token() -> None:
    """The second request gets its first token at 2 s. In the next 2 s, three more tokens arrive."""
    assert decode_rate([[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]) == pytest.approx(3 / 2)


def test_a_second_each_is_a_token_a_second_for_each() -> None:
    assert once(Clockwork(), decode_name(8)) == pytest.approx(8)


def test_a_load_that_takes_less_than_its_share_is_repeated_with_prompts_of_its_own() -> None:
    engine = Clockwork()
    figure = measure(engine.generate, VOCAB_SIZE, decode_name(8), 0, least_seconds=0.05)
    assert figure == pytest.approx(8)
    assert len(engine.asked) > 2
    assert len({tuple(prompt) for prompts in engine.prompts for prompt in prompts}) == 8 * len(
        engine.asked
    )


def test_the_median_of_repetitions_counts() -> None:
    """In consecutive runs, a token takes 1, 1 and 9 seconds, and so on."""

    class Stumbling(Clockwork):
        def generate(self, prompts: Prompts, num_tokens: int) -> Times:
            time.sleep(0.02)
            step = 9.0 if len(self.asked) % 3 == 2 else 1.0
            return [
                [step * second for second in times]
                for times in super().generate(prompts, num_tokens)
            ]

    figure = measure(Stumbling().generate, VOCAB_SIZE, decode_name(1), 0, least_seconds=0.1)
    assert figure == pytest.approx(1)


def test_an_engine_that_stops_early_is_found_out() -> None:
    with pytest.raises(WrongTokens):
        once(Clockwork(missing=1), PREFIX)


def test_warming_up_takes_little_and_foretells_no_prompt() -> None:
    engine = Clockwork()
    warm_up(engine.generate, VOCAB_SIZE)
    assert engine.asked == [(1, 512, 1), (1, 128, 4), (4, 128, 4), (4, 128, 4), (4, 416, 4)]
    seen = {tuple(prompt) for prompts in engine.prompts for prompt in prompts}
    once(engine, PREFIX)
    assert seen.isdisjoint(map(tuple, engine.prompts[-1]))


def test_limits_of_a_model_small_enough_to_count() -> None:
    """A layer has 4 weights in norms, 16 in attention and 24 in the MLP. The tied head has 40."""
    shape = Shape(2, 2, 1, 1, 4, 20, tied_embeddings=True)
    layer = 2 * 2 + 4 * (2 * 2) + 3 * (2 * 4)
    figures = Limits(flops=1e6, bytes_per_second=1e6).figures(shape)
    assert figures[PREFILL] == pytest.approx(1e6 / (2 * 2 * layer))
    weights = 2 * layer + 40
    assert figures[decode_name(1)] == pytest.approx(1e6 / (2 * weights))
    assert figures[decode_name(32)] == pytest.approx(1e6 / (2 * weights))
    assert PREFIX not in figures
