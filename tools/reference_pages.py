"""Writes the reference pages from the code: `python -m tools.reference_pages`.

docs/settings.md and docs/fields.md have lists of settings and of request fields, docs/metrics.md
lists of metrics, and the README of the Helm chart its values. Each list is between a line
`<!-- NAME -->` and a line `<!-- end -->`.
"""

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.cli.settings import UpSettings
from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import as_text, flag_name
from services.common.telemetry.metric_specs import edge, process, replica, vllm
from services.common.telemetry.metric_specs.spec import MetricSpec, Source
from services.download.settings import DownloadSettings
from services.gateway.adapters.http.anthropic.bodies import CountTokensBody, MessagesBody
from services.gateway.adapters.http.openai import bodies
from services.gateway.adapters.http.openai.responses.bodies import ResponsesBody
from services.gateway.options.listed import OPTIONS
from services.gateway.settings import GatewaySettings
from services.kvpool.settings import KVPoolSettings
from services.scheduler.settings import SchedulerSettings
from services.worker.settings import WorkerSettings
from tools.chart_values import VALUES, chart_values

_FIELDS = "__dataclass_fields__"
DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    *(DOCS / name for name in ("settings.md", "metrics.md", "fields.md")),
    VALUES.with_name("README.md"),
]
METRICS: dict[str, tuple[MetricSpec, ...]] = {
    "metrics: vllm": vllm.SPECS,
    "metrics: replica": replica.SPECS,
    "metrics: edge": edge.SPECS,
    "metrics: prefix index": edge.INDEX_SPECS,
    "metrics: process": process.SPECS,
    **{
        f"metrics: {option.__name__}": tuple(option.metric_specs)
        for option in OPTIONS
        if option.metric_specs
    },
}
ALL_SPECS = {spec.name: spec for specs in METRICS.values() for spec in specs}
"""The registry of metrics, with the metrics of a gateway's options."""
SETTINGS: dict[str, Any] = {
    "settings: every service": ServiceSettings,
    "settings: gateway": GatewaySettings,
    "settings: scheduler": SchedulerSettings,
    "settings: kvpool": KVPoolSettings,
    "settings: worker": WorkerSettings,
    "settings: stepwell up": UpSettings,
    "settings: download": DownloadSettings,
}
BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": bodies.CompletionBody,
    "/v1/chat/completions": bodies.ChatCompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": bodies.EmbeddingBody,
    "/score": bodies.ScoreBody,
    **{path: body for option in OPTIONS for path, body in option.bodies.items()},
    "/tokenize": bodies.TokenizeBody,
    "/detokenize": bodies.DetokenizeBody,
}
_PART = re.compile(r"(<!-- (?!end )(?P<name>[^>]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def labels(spec: MetricSpec) -> tuple[str, ...]:
    """The labels of a metric in Prometheus. A gateway also adds the label `replica`."""
    return tuple(dict.fromkeys((*spec.source.added_labels, *spec.labels)))


def metrics(specs: Sequence[MetricSpec]) -> Iterator[str]:
    """Yields the lines of a list of metrics, each with its kind, its unit if the name lacks it, and
    its labels. Labels that all metrics have, and the first metric's source, are above the list.
    """
    shared = [label for label in labels(specs[0]) if all(label in labels(spec) for spec in specs)]
    common = f"Source: {_source(specs[0])}, unless another one is named."
    if shared:
        common = f"Labels of all: {_named(shared)}. {common}"
    yield from _wrapped(common)
    yield ""
    for spec in specs:
        own = [label for label in labels(spec) if label not in shared]
        what = [spec.kind.value]
        what += [spec.unit] if spec.unit and spec.unit not in spec.served_name else []
        what += [_source(spec)] if spec.source is not specs[0].source else []
        what += [_named(own)] if own else []
        yield from _wrapped(f"* `{spec.served_name}` ({', '.join(what)}): {spec.text}")


def settings(cls: Any) -> Iterator[str]:
    """Yields a program's settings. Settings that it passes to services are only named."""
    shared = {} if cls is ServiceSettings else _fields(ServiceSettings)
    passed: dict[tuple[str, ...], list[str]] = {}
    for name, field in _fields(cls).items():
        flag = flag_name(name)
        if services := field.metadata.get("services"):
            passed.setdefault(services, []).append(f"`{flag}`")
        elif name in shared and field.metadata == shared[name].metadata:
            if field.default != shared[name].default:
                yield from _wrapped(f"* `{flag}` ({as_text(field.default)})")
        else:
            secret = " A secret." if field.metadata["is_secret"] else ""
            text = _linked(field.metadata["doc"])
            yield from _wrapped(f"* `{flag}`{_default(field)}: {text}.{secret}")
    for services, flags in passed.items():
        to = "every service" if len(services) > 2 else " and ".join(services)
        yield from _wrapped(f"* Passed to {to}: {', '.join(flags)}.")


def request_fields() -> Iterator[str]:
    """Yields each route with the classes of its body, then each class with its fields."""
    classes: dict[str, type[BaseModel]] = {}
    for path, body in BODIES.items():
        declaring = [base for base in body.__mro__ if _own_fields(base)]
        classes |= {base.__name__: base for base in declaring}
        yield from _wrapped(f"* `POST {path}`: {', '.join(base.__name__ for base in declaring)}")
    for name, base in classes.items():
        properties = base.model_json_schema()["properties"]
        aliases = [base.model_fields[field].alias or field for field in _own_fields(base)]
        fields = ", ".join(f"`{alias}`{_kind(properties[alias])}" for alias in aliases)
        yield ""
        yield from _wrapped(f"**{name}**: {fields}")


LISTS: dict[str, Callable[[], Iterable[str]]] = {
    **{name: lambda specs=specs: metrics(specs) for name, specs in METRICS.items()},  # type: ignore[misc]
    **{name: lambda cls=cls: settings(cls) for name, cls in SETTINGS.items()},  # type: ignore[misc]
    "fields": request_fields,
    "values": lambda: chart_values(_wrapped),
}


def filled(page: str) -> str:
    """Replaces the lists in a page. Raises KeyError for an unknown list."""
    return _PART.sub(lambda part: "\n".join([part[1][:-1], *LISTS[part["name"]](), ""]), page)


def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """The settings of a class. Inherited settings are last."""
    inherited = {name for base in cls.__mro__[1:] for name in getattr(base, _FIELDS, ())}
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.name in inherited)
    return {field.name: field for field in fields}


def _default(field: dataclasses.Field[Any]) -> str:
    """The default in brackets. It is empty if the description explains the default."""
    if field.default is dataclasses.MISSING:
        return " (required)"
    if isinstance(field.default, bool):
        return f" ({'yes' if field.default else 'no'})"
    text = "" if field.default is None else as_text(field.default)
    return f" ({text})" if text else ""


def _linked(text: str) -> str:
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _own_fields(cls: type) -> list[str]:
    """The fields that a class of bodies itself declares, including fields that it overrides."""
    declared = inspect.get_annotations(cls)
    return [name for name in getattr(cls, "model_fields", ()) if name in declared]


def _kind(schema: dict[str, Any]) -> str:
    """The type of a field in brackets: its possible values, or its JSON type if it is no string."""
    kinds = [kind for kind in _kinds(schema) if kind != "null"] or ["null"]
    return "" if kinds == ["string"] else f" ({' or '.join(dict.fromkeys(kinds))})"


def _kinds(schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield "object"
    for part in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from _kinds(part)
    if "enum" in schema or "const" in schema:
        yield from map(json.dumps, schema.get("enum", (schema.get("const"),)))
    elif schema.get("type") == "array":
        inner = " or ".join(dict.fromkeys(_kinds(schema.get("items", {}))))
        yield f"list of {inner}"
    elif not {"$ref", "anyOf", "oneOf"} & schema.keys():
        yield str(schema.get("type", "any"))


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _source(spec: MetricSpec) -> str:
    return "every service" if spec.source is Source.EVERY else spec.source.value


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        100,
        subsequent_indent="  " if text.startswith("* ") else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text()))
