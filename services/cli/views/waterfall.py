"""Formats a trace as lines of text, with a bar for each span's time, and the span's attributes."""

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from rich.text import Text

from services.cli.amounts import seconds_text

COLOURS = {
    "stepwell-gateway": "cyan",
    "stepwell-scheduler": "yellow",
    "stepwell-kvpool": "magenta",
    "stepwell-worker": "green",
}
_BAR, _WAIT, _INSTANT, _EVENT = "█", "░", "▏", "◆"
_ASCII = str.maketrans("█░▏◆µ·…", "#.|*u-~")
_LONGEST_NAME, _SHORTEST_BAR, _DURATION = 40, 12, 9
_WAIT_REASON = ".wait_reason"
_IN_THE_HEADLINE = {"stepwell.request.id"}
_TIME = "stepwell.time"
_SHOWN_PREFIXES = ("stepwell.", "gen_ai.usage.", "gen_ai.latency.", "error.", "http.", "rpc.")

Document = Mapping[str, Any]


def waterfall(trace: Document, width: int, *, every_attribute: bool = False) -> list[Text]:
    """Lines of at most `width` characters (at least 40). `trace` is from /traces/{name}."""
    width = max(width, 40)
    spans: Sequence[Document] = trace["spans"]
    total = max((span["start"] + span["seconds"] for span in spans), default=0.0)
    lines = [*_wrapped(_headline(trace, total), width), *_time_line(trace, width)]
    name_width = min(
        max((2 * span["depth"] + len(span["name"]) for span in spans), default=0),
        _LONGEST_NAME,
        width - _SHORTEST_BAR - _DURATION - 2,
    )
    bar_width = width - name_width - _DURATION - 2
    for span in spans:
        lines.append(_span(span, total, name_width, bar_width))
        for note in _notes(span, every_attribute=every_attribute):
            lines += _wrapped(note, width)
    lines.append(_legend(spans))
    lines += _explanations(trace, width)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _headline(trace: Document, total: float) -> Text:
    line = Text(trace["request_id"] or "request", style="bold")
    line.append(f"  {seconds_text(total)}", style="bold")
    line.append(f"  trace {trace['trace_id']}", style="dim")
    if trace["is_running"]:
        line.append("  running: these are its spans so far", style="yellow")
    elif not trace["is_complete"]:
        line.append("  not complete: further spans will arrive", style="yellow")
    return line


def _wrapped(line: Text, width: int) -> list[Text]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line.plain) - len(line.plain.lstrip()))
    style = line.style or (line.spans[0].style if line.spans else "")
    parts = wrap(line.plain, width, initial_indent="", subsequent_indent=f"{indent}  ")
    return [Text(part, style=style) for part in parts]


def _time_line(trace: Document, width: int) -> list[Text]:
    time: Document | None = trace["time"]
    if time is None:
        return []
    return [Text(line, style="bold") for line in wrap(time["line"], width, subsequent_indent="  ")]


def _explanations(trace: Document, width: int) -> list[Text]:
    time: Document | None = trace["time"]
    lines: list[Text] = []
    for part in [] if time is None else time["parts"]:
        text = f"{part['name']}: {part['explanation']}"
        if part["waited_for"]:
            text += f" Request {part['waited_for']} held most of the missing resource."
        if part["step"] is not None:
            text += f" The longest wait began with step {part['step']}."
        lines += [Text(line, style="dim") for line in wrap(text, width, subsequent_indent="  ")]
    return lines


def _span(span: Document, total: float, name_width: int, bar_width: int) -> Text:
    indent = 2 * span["depth"]
    name = (" " * indent + span["name"])[:name_width].ljust(name_width)
    failed = span["error"] is not None
    colour = "red" if failed else COLOURS.get(span["service"], "blue")
    line = Text(name, style="red" if failed else "")
    line.append(" ")
    fill = _WAIT if is_wait(span) else _BAR
    line.append(_bar(span["start"], span["seconds"], total, bar_width, fill), style=colour)
    line.append(f" {seconds_text(span['seconds']):>{_DURATION}}")
    return line


def is_wait(span: Document) -> bool:
    """Whether the span is a wait of a request. Its attributes then include the wait's reason."""
    return any(name.endswith(_WAIT_REASON) for name in span["attributes"])


def _bar(start: float, seconds: float, total: float, width: int, fill: str) -> str:
    scale = width / total if total > 0 else 0.0
    first = min(int(start * scale), width - 1)
    last = min(round((start + seconds) * scale), width)
    bar = fill * (last - first) or _INSTANT
    return f"{' ' * first}{bar}".ljust(width)[:width]


def _notes(span: Document, *, every_attribute: bool) -> Iterator[Text]:
    indent = " " * (2 * span["depth"] + 2)
    if span["error"] is not None:
        yield Text(f"{indent}{span['error']}", style="red")
    said = _shown_attributes(span["attributes"], span["name"], every_attribute=every_attribute)
    if every_attribute:
        yield from (Text(f"{indent}{one}", style="dim") for one in said)
    elif said:
        yield Text(f"{indent}{' · '.join(said)}", style="dim")
    for event in span["events"]:
        said = _shown_attributes(event["attributes"], event["name"], every_attribute=True)
        text = f"{indent}{_EVENT} {event['name']} at {seconds_text(event['at'])}"
        yield Text("  ".join([text, *said]), style="dim")


def _shown_attributes(
    attributes: Mapping[str, Any], known: str, *, every_attribute: bool
) -> list[str]:
    """Formats attributes as names and values. Without `every_attribute`, shows only Stepwell's own
    attributes, without the prefix of their names, and omits empty values, zeros and values with
    which the span's name (`known`) ends.
    """
    return [
        f"{name if every_attribute else _short(name)} {_value(value)}"
        for name, value in attributes.items()
        if every_attribute
        or (
            name.startswith(_SHOWN_PREFIXES)
            and name not in _IN_THE_HEADLINE
            and not name.startswith(_TIME)
            and value not in (0, "", [], None)
            and not known.endswith(f".{value}")
        )
    ]


def _short(name: str) -> str:
    for prefix in _SHOWN_PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _legend(spans: Sequence[Document]) -> Text:
    line = Text()
    for service in dict.fromkeys(span["service"] for span in spans):
        line.append(f"{_BAR} {service.removeprefix('stepwell-')}  ", COLOURS.get(service, "blue"))
    if any(map(is_wait, spans)):
        line.append(f"{_WAIT} waits")
    return line


def in_ascii(line: Text) -> Text:
    """Replaces the line's characters by ASCII characters. Positions and styles stay the same."""
    plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return Text(plain, spans=line.spans, style=line.style)
