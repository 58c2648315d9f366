"""Formats the gateway's /activity as text: queues, budget, pool, steps, hit rate and requests."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from rich.text import Text

from services.cli.amounts import count_text, seconds_text
from services.cli.views.samples import (
    Document,
    Sample,
    replica_state,
    state_colour,
    waiting_text,
    waits_for,
)

_TWO_COLUMNS = 96
"""The minimum screen width at which a replica's rows are laid out in two columns."""
_LABEL = 10
_FULL, _EMPTY = "█", "░"
HIDDEN = "(another tenant's)"
_MOST_PROGRAMS = 8
"""Limit on the programs (agents' sessions) that a replica's line about pausing programs names."""
_LEAST_ROWS = 3
"""The minimum number of request rows of each replica, at any screen height."""


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the request table. It is shown from a minimum screen width."""

    title: str
    width: int
    from_width: int = 0
    left: bool = False


_COLUMNS = (
    _Column("REQUEST", 30, left=True),
    _Column("STATE", 9, left=True),
    _Column("COMPUTED", 11),
    _Column("OUTPUT", 6, 64),
    _Column("CACHED", 6, 72),
    _Column("AGE", 8, 78),
    _Column("WAITS FOR", 20, 100, left=True),
)


def screen(sample: Sample, before: Sample | None, width: int, height: int) -> list[Text]:
    """Returns lines of at most `width` characters. Rates are shown only if `before` is given. As
    many requests are shown as fit into `height` lines, but at least three for each replica.
    """
    activity = sample.answer
    lines = [_headline(activity)]
    for queued in islice(activity["queued"], _LEAST_ROWS):
        name, why = queued["request_id"] or HIDDEN, waits_for(queued["wait_reason"])
        lines.append(Text(f"  waits here: {name} for {why}", style="yellow"))
    replicas = activity["replicas"]
    rows_of = [_rows_of(one, sample.rates(one, before), width) for one in replicas]
    # Each replica also has an empty line, a title, a table header and a line for omitted requests.
    taken = len(lines) + sum(len(rows) + 4 for rows in rows_of)
    room = max(_LEAST_ROWS, (height - taken) // max(1, len(replicas)))
    for replica, rows in zip(replicas, rows_of, strict=True):
        title = Text(f"replica {replica['address']}", style="bold")
        title.append(f"  {replica_state(replica)}", style=state_colour(replica))
        lines += [Text(), title, *rows, *_requests(replica["requests"], width, room)]
        lines += _programs(replica["programs"])
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _headline(activity: Document) -> Text:
    line = Text(activity["model"], style="bold")
    line.append(f"  {activity['requests_in_flight']} requests at the gateway")
    if activity["queued"]:
        line.append(f", {len(activity['queued'])} wait there", style="yellow")
    if activity["draining"]:
        line.append("  draining", style="yellow")
    return line


def _rows_of(replica: Document, rates: Mapping[str, float], width: int) -> list[Text]:
    if replica["stats"] is None:
        return []
    is_wide = width >= _TWO_COLUMNS
    half = (width - 2) // 2 if is_wide else width
    left = [_row(*row, half) for row in _capacities(replica)]
    right = [_row(*row, half) for row in _speeds(replica["stats"], rates)]
    if not is_wide:
        return left + right
    joined = []
    for first, second in zip_longest(left, right, fillvalue=Text()):
        line = first.copy()
        line.truncate(half, overflow="ellipsis", pad=True)
        line.append("  ")
        joined.append(line.append_text(second))
    return joined


Row = tuple[str, str, float | None]
"""A label, a text, and the filled fraction of a bar, or None without a bar."""


def _row(label: str, text: str, share: float | None, width: int) -> Text:
    line = Text(f"  {label:<{_LABEL}}", style="dim")
    if share is not None:
        length = max(6, min(24, width // 4))
        full = round(min(1.0, max(0.0, share)) * length)
        colour = "green" if share < 0.75 else "yellow" if share < 0.95 else "red"
        line.append(_FULL * full, style=f"not dim {colour}")
        line.append(_EMPTY * (length - full) + " ")
    line.append(text, style="not dim")
    return line


def _capacities(replica: Document) -> Iterator[Row]:
    stats = replica["stats"]
    running, most = stats["num_running"], stats["max_num_seqs"]
    yield "running", f"{running} of {most}", _share(running, most)
    yield "waiting", waiting_text(stats), None
    yield "budget", *_budget(replica["steps"], stats["max_num_batched_tokens"])
    usable = stats["num_usable_blocks"]
    held = usable - stats["num_free_blocks"]
    blocks = replica["blocks"]
    cached = "" if blocks is None else f", {blocks['num_cached']} cached"
    yield "pool", f"{held} of {usable} held{cached}", _share(held, usable)


def _budget(steps: Sequence[Document], budget: int) -> tuple[str, float | None]:
    """A text with the average number of tokens in a step, and that number's ratio to `budget`."""
    if not steps:
        return f"no step of {budget} tokens", 0.0
    prefill = sum(step["num_prefill_tokens"] for step in steps) / len(steps)
    decode = sum(step["num_decode_tokens"] for step in steps) / len(steps)
    text = f"{prefill:.0f} prefill + {decode:.0f} decode of {budget}"
    return text, _share(prefill + decode, budget)


def _speeds(stats: Document, rates: Mapping[str, float]) -> Iterator[Row]:
    def rate(name: str) -> str:
        return f"{count_text(rates[name])}/s" if rates else "-"

    yield "steps", f"{rate('num_steps')}, {seconds_text(stats['mean_step_nanos'] / 1e9)} each", None
    generated, prompt = rate("num_generated_tokens"), rate("num_prompt_tokens")
    yield "tokens", f"{generated} generated, {prompt} of prompts", None
    hits = _share(stats["num_cached_tokens"], stats["num_prompt_tokens"])
    yield "hit rate", f"{100 * hits:.1f} % of prompt tokens", None
    lost = f", {count_text(stats['num_lost_tokens'])} tokens given up"
    preempted = stats["num_preemptions"]
    yield "preempted", f"{preempted}{lost if preempted else ''}", None


def _requests(requests: Sequence[Document], width: int, room: int) -> Iterator[Text]:
    if not requests:
        return
    columns = [column for column in _COLUMNS if width >= column.from_width]
    spare = width - 2 - sum(column.width + 1 for column in columns)
    first = max(12, columns[0].width + min(spare, 20))
    widths = [first, *(column.width for column in columns[1:])]
    yield _cells([column.title for column in columns], columns, widths, "dim")
    # Waiting requests get at least half of the rows if there are enough waiting requests.
    running = [one for one in requests if one["state"] == "running"]
    waiting = [one for one in requests if one["state"] != "running"]
    num_running = max(room - len(waiting), room - room // 2)
    shown = [*running[:num_running]]
    shown += waiting[: room - len(shown)]
    for request in shown:
        style = "" if request["state"] == "running" else "yellow"
        yield _cells(_values(request)[: len(columns)], columns, widths, style)
    if len(shown) < len(requests):
        yield Text(f"  and {len(requests) - len(shown)} more", style="dim")


def _programs(programs: Sequence[Document]) -> Iterator[Text]:
    if not programs:
        return
    num_blocks = sum(one["num_blocks"] for one in programs)
    shown = [
        f"{_fitted(one['program'] or HIDDEN, 20)} ({one['tool'] or 'no tool'}, "
        f"{seconds_text(one['seconds'])}, {one['num_blocks']} blocks)"
        for one in programs[:_MOST_PROGRAMS]
    ]
    text = f"  {len(programs)} programs pause with {num_blocks} blocks: {', '.join(shown)}"
    yield Text(text, style="cyan")


def _values(request: Document) -> list[str]:
    total = request["num_prompt_tokens"] + request["num_output_tokens"]
    computed = f"{request['num_computed_tokens']}/{total}"
    reason = request["wait_reason"]
    return [
        request["request_id"] or HIDDEN,
        request["state"],
        computed,
        str(request["num_output_tokens"]),
        str(request["num_cached_tokens"]),
        seconds_text(request["seconds"]),
        "" if reason is None else waits_for(reason),
    ]


def _cells(
    values: Sequence[str], columns: Sequence[_Column], widths: Sequence[int], style: str
) -> Text:
    cells = [
        _fitted(value, width).ljust(width) if column.left else value.rjust(width)
        for value, column, width in zip(values, columns, widths, strict=True)
    ]
    return Text("  " + " ".join(cells).rstrip(), style=style)


def _fitted(value: str, width: int) -> str:
    """Shortens an id in the middle, since ids differ at their ends."""
    if len(value) <= width:
        return value
    end = (width - 1) // 2
    return f"{value[: width - 1 - end]}…{value[-end:]}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
