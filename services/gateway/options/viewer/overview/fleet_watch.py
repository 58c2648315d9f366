"""Samples the metrics of this gateway and its replicas, and evaluates the alert rules over them."""

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import lru_cache
from pathlib import Path

import yaml

from services.gateway.adapters.schedulers.scheduler_links import SchedulerLinks
from services.gateway.options.viewer.core.alerts.alerts import LISTED_SECONDS, Alerts, Rules
from services.gateway.options.viewer.core.alerts.series_store import MAX_SERIES, Labels, SeriesStore

SAMPLE_SECONDS = 20.0
"""Seconds between two samples. rate(...[2m]) needs two samples within two minutes."""
LOOK_SECONDS = 5.0
"""Minimum number of seconds between two samples while the page is shown."""
RULES = Path(__file__).parents[1] / "rules"
"""The rule files of Prometheus, deploy/prometheus/rules."""
MINUTE = 60.0
PAGE_SERIES = {
    "process_start_time_seconds": 0.0,
    "stepwell_build_info": 0.0,
    "stepwell_tls_certificate_seconds_left": 0.0,
    "stepwell_discovery_up": 0.0,
    "stepwell_registration_up": 0.0,
    "stepwell_prefix_index_state": 0.0,
    "stepwell_idempotent_sharing": 0.0,
    "stepwell_tenant_num_running": 0.0,
    "stepwell_tenant_num_waiting": 0.0,
    "stepwell_tenant_tokens_total": MINUTE,
    "stepwell_tenant_refusals_total": LISTED_SECONDS,
    "vllm:admission_rejections_total": LISTED_SECONDS,
}
"""The metrics that the page shows, with the number of seconds for which samples are needed."""
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


class FleetWatch:
    """Takes a sample every SAMPLE_SECONDS, and more often while callers ask for it."""

    def __init__(self, gateway: str, collect: Callable[[], Awaitable[bytes]]) -> None:
        """`gateway` is this gateway's name. `collect` returns all metrics as text, in which the
        label `replica` is a replica's address.
        """
        self.gateway = gateway
        self.links: list[SchedulerLinks] = []
        """The links to the replicas of each model."""
        self.rules = Rules()
        self.store = SeriesStore(PAGE_SERIES)
        self.alerts = Alerts(self.rules)
        self._collect = collect
        self._sampling = asyncio.Lock()
        self._sampled_at = -LOOK_SECONDS
        self._unix_offset = time.time() - time.monotonic()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Takes a sample, unless the last one is younger than LOOK_SECONDS."""
        async with self._sampling:
            if time.monotonic() < self._sampled_at + LOOK_SECONDS:
                return
            text = await self._collect()
            self._sampled_at = time.monotonic()
            # Replicas have thousands of series, so the event loop does not wait for this.
            # A scheduler that was never reached is not down: it may be starting for the first time.
            known = (link for links in self.links for link in links.all())
            addresses = {link.address for link in known if link.was_opened}
            await asyncio.to_thread(self._take, text, addresses, self._sampled_at)

    def _take(self, text: bytes, addresses: Collection[str], now: float) -> None:
        if not self.rules.alerts:
            self.rules = Rules.of(
                yaml.safe_load(path.read_text()) for path in sorted(RULES.glob("*.yml"))
            )
            self.alerts = Alerts(self.rules)
            longest = self.rules.keep_seconds
            self.store = SeriesStore(
                longest | {name: max(s, longest.get(name, 0)) for name, s in PAGE_SERIES.items()}
            )
        store, answered = self.store, set()
        store.begin(self._unix_offset + now)
        for series, value in _samples(text.decode(), store.keep_seconds):
            name, replica, labels = _parsed(series, self.gateway)
            answered.add(replica)
            if (number := _number(value)) is not None:
                store.add(name, labels, number)
        for address in addresses:
            replica_up = [("job", "stepwell-replica"), ("instance", address)]
            store.add("up", frozenset(replica_up), float(address in answered))
        self.alerts.evaluate(store)
        store.end()


def _samples(text: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields the series with one of `names`, each with its value."""
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in names} | set(names)
    for family in f"\n{text}".split("\n# HELP "):
        if family.partition(" ")[0] in families:
            for line in family.split("\n"):
                if line.partition("{")[0] in names:
                    series, _, value = line.rpartition(" ")
                    yield series, value


def _number(text: str) -> float | None:
    """Returns None for a text that a replica should not send, and for infinity and NaN."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@lru_cache(MAX_SERIES)
def _parsed(series: str, gateway: str) -> tuple[str, str, Labels]:
    """Returns the name of a series, its label `replica`, and the labels that Prometheus would give
    it: `replica` is what `instance` is if Prometheus scrapes the replica itself.
    """
    name, _, written = series.partition("{")
    labels = {
        label: re.sub(r"\\.", lambda found: _ESCAPED.get(found[0], found[0]), value)
        for label, value in _LABEL.findall(written)
    }
    replica = labels.pop("replica", "")
    labels["job"] = "stepwell-replica" if replica else "stepwell-gateway"
    labels["instance"] = replica or gateway
    return name, replica, frozenset(labels.items())
