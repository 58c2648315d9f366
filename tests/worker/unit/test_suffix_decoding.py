"""Drafts of suffix trees equal the drafts of a reference that counts all occurrences of strings."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.backends.native.suffix_decoding import NativeSuffixDecoding
from services.worker.backends.suffix_decoding import SuffixRules
from services.worker.build import build_worker
from services.worker.core.errors import NoSpeculation
from services.worker.settings import WorkerSettings
from tests.tiny_models import save_tiny_model
from tests.worker.suffix_reference import RULES, CountedSuffixes, suffix_trees

ROWS, LENGTH = 3, 400
KEYS = (b"", b"ann", b"ben")


class Requests:
    def __init__(self, *told: NativeSuffixDecoding | CountedSuffixes) -> None:
        self._told = told
        self.token_ids = np.zeros((ROWS, LENGTH), np.int32)
        self.num_tokens = np.zeros(ROWS, np.int32)

    def enter(self, row: int, prompt: list[int], key: bytes = b"") -> None:
        self.leave(row)
        self.num_tokens[row] = 0
        self._append(row, prompt)
        for one in self._told:
            one.enter(row, key, len(prompt))

    def write(self, written: dict[int, list[int]]) -> None:
        """Appends the tokens that a step has sampled. `written` maps rows to tokens."""
        for row, tokens in written.items():
            self._append(row, tokens)
        rows = np.array(list(written), np.int32)
        for one in self._told:
            one.take_in(rows, self.token_ids, self.num_tokens)

    def propose(self, row: int, most: int) -> list[list[int]]:
        known = self.token_ids, self.num_tokens
        return [list(one.propose(row, *known, most)) for one in self._told]

    def leave(self, row: int) -> None:
        for one in self._told:
            one.leave(row)

    def _append(self, row: int, tokens: list[int]) -> None:
        begin = self.num_tokens[row]
        self.token_ids[row, begin : begin + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)


tokens = st.lists(st.integers(0, 2), min_size=1, max_size=9)
rows = st.integers(0, ROWS - 1)
events = st.one_of(
    st.tuples(st.just("enter"), rows, tokens, st.sampled_from(KEYS)),
    st.tuples(st.just("write"), st.dictionaries(rows, tokens, min_size=1)),
    st.tuples(st.just("propose"), rows, st.integers(1, 8)),
    st.tuples(st.just("leave"), rows),
)


@settings(max_examples=400, deadline=None)
@given(
    events=st.lists(events, max_size=40),
    depth=st.integers(2, 7),
    max_cached=st.sampled_from([0, 1, 2, 5, 100]),
    factor=st.sampled_from([0.3, 1.0, 1.7]),
    least=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
)
def test_drafts_equal_those_of_the_counting_reference(
    events: list[tuple], depth: int, max_cached: int, factor: float, least: float
) -> None:
    rules = SuffixRules(depth, max_cached, factor, least)
    native, counted = suffix_trees(rules), CountedSuffixes(rules)
    requests, present = Requests(native, counted), set[int]()
    for kind, *of in events:
        if kind == "enter":
            present.add(of[0])
            requests.enter(*of)
        elif kind == "leave":
            present.discard(of[0])
            requests.leave(*of)
        elif kind == "write" and (written := {row: of[0][row] for row in of[0] if row in present}):
            requests.write(written)
        elif kind == "propose" and of[0] in present:
            ours, expected = requests.propose(*of)
            assert ours == expected
        assert native.num_cached == len(counted.ended)


def test_drafts_follow_the_response_of_another_request() -> None:
    requests = Requests(suffix_trees())
    requests.enter(0, [1, 2, 3])
    requests.write({0: [10, 11, 12, 13, 14, 15]})
    requests.leave(0)
    requests.enter(0, [7, 8])
    requests.write({0: [10, 11]})
    # The string 10, 11 occurs twice, and was followed by 12 once.
    assert requests.propose(0, 8) == [[12, 13]]
    requests.write({0: [12, 13]})
    assert requests.propose(0, 8) == [[14, 15]]


def test_requests_with_different_keys_share_no_responses() -> None:
    requests = Requests(suffix_trees())
    requests.enter(0, [1, 2, 3], b"ann")
    requests.write({0: [10, 11, 12, 13]})
    for key, expected in ((b"ben", []), (b"", []), (b"ann", [12, 13])):
        requests.enter(1, [7, 8], key)
        requests.write({1: [10, 11]})
        assert requests.propose(1, 8) == [expected]


def test_tokens_known_at_entry_are_not_drafts_for_other_requests() -> None:
    requests = Requests(suffix_trees())
    requests.enter(0, [10, 11, 12, 13])
    requests.write({0: [20]})
    requests.enter(1, [9, 10, 11])
    assert requests.propose(1, 8) == [[]]
    requests.enter(1, [9, 10, 11, 12, 10, 11])
    assert requests.propose(1, 8) == [[12, 10]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), max_bytes=st.sampled_from([2000, 20_000, 60_000]))
def test_trees_stay_within_their_memory_and_go_on(seed: int, max_bytes: int) -> None:
    """Some texts repeat parts of earlier texts, which needs more memory than new texts."""
    random = np.random.default_rng(seed)
    native = suffix_trees(RULES, max_bytes)
    requests, texts = Requests(native), random.integers(0, 500, (5, 300))
    a_node = 40
    for _ in range(100):
        requests.enter(0, [1])
        if random.random() < 0.5:
            texts[random.integers(5)] = random.integers(0, 500, 300)
        start, end = np.sort(random.integers(0, 301, 2))
        requests.write({0: texts[random.integers(5), start:end].tolist()})
        assert native.cached_bytes <= max_bytes + RULES.max_tree_depth * a_node
    requests.leave(0)
    for _ in range(2 * max_bytes // 300):
        requests.enter(0, [1])
        requests.write({0: random.integers(0, 500, 300).tolist()})
    assert native.cached_bytes <= max_bytes * 7 // 8 + 300 * a_node
    requests.enter(0, [1])
    requests.write({0: [1000, 1001, 1002, 1003]})
    requests.enter(0, [1])
    requests.write({0: [1000, 1001]})
    assert requests.propose(0, 8) == [[1002, 1003]]


def test_the_response_that_ended_first_is_forgotten_first() -> None:
    random = np.random.default_rng(5)
    native = suffix_trees(RULES, 64 << 10)
    requests = Requests(native)
    written = [random.integers(0, 50, 300).tolist() for _ in range(60)]
    for text in written:
        requests.enter(0, [1])
        requests.write({0: text})
    assert 1 < native.num_cached < 20
    for text, expected in ((written[0], []), (written[-2], written[-2][12:16])):
        requests.enter(1, [1])
        requests.write({1: text[:12]})
        assert requests.propose(1, 4) == [expected]
    native.clear()
    assert (native.num_cached, native.cached_bytes) == (0, 0)


def test_each_of_many_responses_is_found_until_it_is_forgotten() -> None:
    """With 45,000 strings, the hash table of the trees' children grows many times. Forgetting a
    response removes children from it.
    """
    native = suffix_trees(RULES)
    requests, most = Requests(native), RULES.max_cached_requests
    written = np.random.default_rng(5).permutation(45_000).reshape(150, 300).tolist()
    for text in written:
        requests.enter(0, [1])
        requests.write({0: text})
    assert native.num_cached == most
    assert native.cached_bytes == pytest.approx(300 * (most + 1) * 44, abs=100)
    first_kept = len(written) - 1 - most
    for number, text in enumerate(written):
        requests.enter(1, text[:12])
        assert requests.propose(1, 4) == [text[12:16] if number >= first_kept else []]


def test_the_cache_leaves_trees_of_responses_their_memory(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")

    def left_mib(**speculation: object) -> float:
        """The memory in MiB that KV-cache sizing leaves to activations and suffix trees."""
        config = json.dumps({"num_speculative_tokens": 4, **speculation})
        wanted = WorkerSettings(model=tmp_path, speculative_config=config)
        sizing = build_worker(wanted, "worker", lambda: None).description.kv_cache_sizing
        found = re.search(r"less ([0-9.]+) MiB for activations", sizing)
        assert found is not None
        return float(found[1])

    without = left_mib(method="ngram")
    assert left_mib(method="suffix") == pytest.approx(without + 256, abs=0.2)
    own_only = {"suffix_decoding_max_cached_requests": 0}
    assert left_mib(method="suffix", **own_only) == pytest.approx(without, abs=0.2)


def test_a_worker_without_compiled_code_refuses_suffix_trees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, "llama")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    config = '{"method": "suffix"}'
    wanted = WorkerSettings(model=tmp_path, num_blocks=8, speculative_config=config)
    with pytest.raises(
        NoSpeculation, match=r"^speculative_config: method suffix needs the compiled kernels"
    ):
        build_worker(wanted, "worker", lambda: None)
