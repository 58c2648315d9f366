"""The histogram has the same counts as the histogram of prometheus_client."""

import random

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as ClientHistogram

from services.common.telemetry.histogram import Histogram
from services.common.telemetry.metric_specs import SPECS, vllm

SPEC = vllm.REQUEST_QUEUE_TIME


def samples(*families):
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_it_counts_as_the_client_library_does() -> None:
    rng = random.Random(5)
    values = [rng.choice([*SPEC.buckets, 0.0, 1e9, rng.uniform(0, 20)]) for _ in range(500)]
    ours = Histogram(SPEC)
    theirs = ClientHistogram(SPEC.name, "It.", buckets=SPEC.buckets, registry=CollectorRegistry())
    for value in values:
        count = rng.randrange(1, 4)
        ours.observe(value, count)
        for _ in range(count):
            theirs.observe(value)
    expected = samples(*theirs.collect())
    read = samples(ours.metric())
    assert read.keys() == expected.keys()
    for key, value in expected.items():
        assert abs(read[key] - value) <= 1e-9 * abs(value), key
    assert ours.count == expected[f"{SPEC.name}_count", None]


def test_the_bounds_of_every_histogram_rise() -> None:
    for spec in SPECS:
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name
