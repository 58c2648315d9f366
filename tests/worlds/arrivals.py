"""Generates the random requests that arrive in a world (a simulated replica)."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from services.common.request.encoder_input import EncoderInput
from services.common.request.program import DeclaredProgram
from services.common.request.repetition import RepetitionDetection
from services.common.request.sampling import SamplingParams
from services.scheduler.core.config import SchedulerConfig
from services.scheduler.core.kv_transfer import KVRole
from services.scheduler.core.policies import retains_contexts
from tests.scenarios.connector import ExternalTokens
from tests.scenarios.stand_in_grammar import StandInGrammar
from tests.worlds.expected import next_tokens
from tests.worlds.world import Arrival, Turn

EOS = 2
MAX_PROMPT = 30
MAX_OUTPUT = 18
LAST_ARRIVAL = 30
MAX_ITEM = 8
_STEMS = (tuple(range(100, 125)), tuple(range(500, 525)))


def make_arrival(
    random: Random, config: SchedulerConfig, families: set[str], earlier: Sequence[Arrival]
) -> Arrival:
    """A random request for a replica with the features `families`. If the scheduling policy retains
    contexts (KV blocks of an ended request for the program's next one), the request may continue an
    earlier one.
    """
    tick = random.randrange(LAST_ARRIVAL)
    prompt = _prompt(random)
    if retains_contexts(config.policy) and earlier and random.random() < 0.5:
        one = random.choice(earlier)
        tick = min(one.tick + random.randrange(20), LAST_ARRIVAL)
        prompt = (*one.token_ids, *next_tokens(one.token_ids, 4), *prompt[-2:])[:MAX_PROMPT]
    sampling = _sampling(random)
    arrival = Arrival(
        tick,
        f"r{len(earlier):02}",
        prompt,
        0,
        sampling,
        priority=random.randrange(3) if config.policy == "priority" else 0,
        salt=random.choice(("", "", "", "salt")),
        reads_prefix_cache=random.random() < 0.9,
        abort_at=tick + random.randrange(25) if random.random() < 0.15 else None,
        must_start_within=random.randrange(1, 12) if random.random() < 0.08 else None,
    )
    if retains_contexts(config.policy):
        arrival = replace(arrival, program=_program(random), tenant=bytes(random.choice((0, 16))))
    if config.pooling:
        arrival = replace(arrival, sampling=SamplingParams())
    elif random.random() < 0.15 and arrival.sampling.max_tokens:
        arrival = _resubmitted(random, arrival)
    if "adapters" in families and random.random() < 0.6:
        arrival = replace(arrival, adapter=bytes([random.randint(1, 4)]) * 32)
    if "encoder" in families and random.random() < 0.7:
        arrival = _with_items(random, arrival)
    if "connector" in families:
        arrival = _with_transfers(random, config, arrival)
    if "sessions" in families and random.random() < 0.5 and not arrival.num_output:
        arrival = _as_session(random, config, arrival)
    elif "grammars" in families and random.random() < 0.6 and not arrival.num_output:
        arrival = replace(arrival, grammar=_grammar(random, tick))
    if "poison" in families and random.random() < 0.25:
        arrival = replace(arrival, breaks_workers_at=random.randrange(len(prompt) + 6))
    if random.random() < 0.04 and not config.pooling:
        arrival = replace(arrival, nan_after=random.randrange(6))
    return arrival


def _program(random: Random) -> DeclaredProgram | None:
    if random.random() < 0.5:
        return None
    name, *parents = random.sample("abcd", 2)
    parent = random.choice(("", *parents))
    tool, ends = random.choice(("", "sed")), random.random() < 0.2
    return DeclaredProgram(name, parent, tool, ends, keep_seconds=300 if name in "ab" else 0)


def _prompt(random: Random) -> tuple[int, ...]:
    """A random prompt. Prompts often share prefixes, because they have few different beginnings."""
    stem = random.choice(_STEMS)[: random.choice((0, 4, 9, 16, 25))]
    tokens = [*stem, *[3 + random.randrange(3)] * random.randint(1, 4)]
    if random.random() < 0.3:  # like a later turn of a conversation
        tokens += next_tokens(tokens, random.randrange(8))
    return tuple(tokens[:MAX_PROMPT])


def _sampling(random: Random) -> SamplingParams:
    repetition = None
    if random.random() < 0.08:
        repetition = RepetitionDetection(3, 1, 2)
    return SamplingParams(
        max_tokens=random.randint(1, MAX_OUTPUT),
        min_tokens=random.randrange(3),
        eos_token_ids=(EOS,),
        stop_token_ids=tuple(random.sample(range(3, 1000), random.choice((0, 0, 40)))),
        repetition_detection=repetition,
    )


def _resubmitted(random: Random, arrival: Arrival) -> Arrival:
    """Converts a request to one that a gateway sends again after the loss of its replica, with the
    output tokens that the client already has.
    """
    most = (arrival.sampling.max_tokens or 1) - 1
    num_output = min(most, random.randrange(4))
    output = next_tokens(arrival.token_ids, num_output)
    ending = {*arrival.sampling.stop_token_ids, EOS}
    if arrival.sampling.repetition_detection or not ending.isdisjoint(output):
        return arrival
    tokens = (*arrival.token_ids, *output)
    return replace(arrival, token_ids=tokens, num_output=num_output)


def _with_items(random: Random, arrival: Arrival) -> Arrival:
    items: list[EncoderInput] = []
    end = 0
    for _ in range(random.randint(1, 3)):
        offset = end + random.randrange(5)
        kind = random.randrange(5)
        length = 2 + kind
        if offset + length > arrival.num_prompt_tokens:
            break
        embeds = (0, length - 1) if kind == 4 else None
        if random.random() < 0.03:  # an identifier whose items usually have another size
            kind = (kind + 1) % 5
        items.append(EncoderInput(f"item{kind}", offset, length, embeds))
        end = offset + length
    return replace(arrival, items=tuple(items))


def _with_transfers(random: Random, config: SchedulerConfig, arrival: Arrival) -> Arrival:
    if random.random() < 0.6:
        # With the role PRODUCER, asynchronous loads do not wait for steps in flight.
        is_async = config.kv_role is not KVRole.PRODUCER and random.random() < 0.6
        fails = random.random() < 0.3
        names_blocks = config.only_grows and len(config.all_groups) == 1
        names_blocks = names_blocks and random.random() < 0.7
        num_tokens = random.randint(1, arrival.num_prompt_tokens + 3)
        arrival = replace(
            arrival,
            external=ExternalTokens(
                num_tokens,
                is_async,
                num_steps=random.randint(1, 6),
                num_undecided=random.choice((0, 0, random.randint(1, 4))),
                max_loads=random.choice((None, 1, 2)),
                failing_blocks=(
                    tuple(random.sample(range(5), 2)) if fails and names_blocks else ()
                ),
                fails_whole=fails and not names_blocks and is_async,
                num_failing_loads=random.randint(1, 2),
            ),
        )
    if random.random() < 0.4:
        arrival = replace(arrival, send_steps=random.randint(1, 6))
    return arrival


def _as_session(random: Random, config: SchedulerConfig, arrival: Arrival) -> Arrival:
    """Turns a request into a session (with input in turns) that fits in `max_model_len`."""
    left = config.max_model_len - 1 - len(arrival.token_ids)
    first = replace(arrival.sampling, max_tokens=random.randint(1, 5), repetition_detection=None)
    left -= first.max_tokens or 0
    turns: list[Turn] = []
    tick = arrival.tick
    for _ in range(random.randrange(4)):
        tick += random.randrange(14)
        tokens = tuple(random.choices(range(3, 9), k=random.randint(1, 5)))
        sampling = replace(first, max_tokens=random.randint(1, 5))
        left -= len(tokens) + (sampling.max_tokens or 0)
        if left < 0:
            break
        turns.append(Turn(tick, tokens, sampling))
    close_at = tick + random.randrange(25)
    return replace(arrival, sampling=first, turns=tuple(turns), close_at=close_at)


def _grammar(random: Random, tick: int) -> StandInGrammar:
    return StandInGrammar(
        EOS,
        ready=tick + random.choice((0, 0, random.randrange(12))),
        length=random.choice((None, random.randrange(1, 8))),
        error=random.random() < 0.1,
        break_at=random.choice((None, None, None, random.randrange(8))),
    )
