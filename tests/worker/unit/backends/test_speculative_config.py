"""How the setting speculative_config is read, and how wrong values are refused."""

import json
from pathlib import Path

import pytest

from services.worker.backends.suffix_decoding import SuffixRules
from services.worker.speculation.config import (
    SpeculativeConfig,
    parse_speculative_config,
    speculative_config_problem,
)


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 7}, (2, 7)),
    ],
)
def test_the_default_of_one_ngram_length_is_the_other(
    given: dict[str, int], lookup: tuple[int, int]
) -> None:
    text = json.dumps({"method": "ngram", "num_speculative_tokens": 6, **given})
    assert parse_speculative_config(text) == SpeculativeConfig(6, *lookup)


def test_a_limit_on_rows_is_parsed() -> None:
    config = parse_speculative_config('{"num_speculative_tokens": 2, "num_rows": 0}')
    assert config.num_rows == 0


@pytest.mark.parametrize("method", [{}, {"method": "draft_model"}])
def test_a_draft_model_is_parsed(method: dict[str, str], tmp_path: Path) -> None:
    text = json.dumps({"num_speculative_tokens": 5, "model": str(tmp_path), **method})
    config = parse_speculative_config(text)
    assert config == SpeculativeConfig(5, model=tmp_path)
    assert config.method == "draft_model"


def test_suffix_trees_as_vllm_has_them_by_default() -> None:
    config = parse_speculative_config('{"method": "suffix"}')
    assert config == SpeculativeConfig(24, suffix=SuffixRules(24, 10_000, 1.0, 0.1))
    assert config.method == "suffix"


@pytest.mark.parametrize(
    ("given", "most", "rules"),
    [
        ({"num_speculative_tokens": 7}, 7, SuffixRules(24, 10_000, 1.0, 0.1)),
        ({"suffix_decoding_max_tree_depth": 500}, 128, SuffixRules(500, 10_000, 1.0, 0.1)),
        (
            {
                "suffix_decoding_max_tree_depth": 9,
                "suffix_decoding_max_cached_requests": 0,
                "suffix_decoding_max_spec_factor": 2,
                "suffix_decoding_min_token_prob": 0.5,
            },
            9,
            SuffixRules(9, 0, 2, 0.5),
        ),
    ],
)
def test_parameters_of_suffix_trees_are_parsed(
    given: dict[str, float], most: int, rules: SuffixRules
) -> None:
    config = parse_speculative_config(json.dumps({"method": "suffix", **given}))
    assert config == SpeculativeConfig(most, suffix=rules)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ngram", "must be JSON"),
        ("[]", "must be a JSON object"),
        (
            '{"num_speculative_tokens": 3, "method": "ngram", "model": "/"}',
            "has 'model', and with method ngram may have only method, num_speculative_tokens, ",
        ),
        (
            '{"num_speculative_tokens": 3, "model": "/", "prompt_lookup_min": 2}',
            "has 'prompt_lookup_min', and with method draft_model may have only method, ",
        ),
        (
            '{"num_speculative_tokens": 3, "model": "/", "draft_tensor_parallel_size": 1}',
            "has 'draft_tensor_parallel_size', and with method draft_model may have only method, ",
        ),
        ('{"num_speculative_tokens": 3, "method": "eagle"}', "must have method ngram or draft_mo"),
        ('{"num_speculative_tokens": 3, "method": []}', "must have method ngram or draft_model"),
        (
            '{"num_speculative_tokens": 3, "method": "draft_model"}',
            "must have the directory of a draft model as model, not None",
        ),
        ('{"num_speculative_tokens": 3, "model": "/nowhere"}', "there is no directory /nowhere"),
        (
            '{"method": "suffix", "prompt_lookup_min": 2}',
            "has 'prompt_lookup_min', and with method suffix may have only method, ",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 1}',
            "must have suffix_decoding_max_tree_depth from 2 to 1024",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_tree_depth": 2.5}',
            "must have suffix_decoding_max_tree_depth from 2 to 1024",
        ),
        (
            '{"method": "suffix", "suffix_decoding_min_token_prob": "0.1"}',
            "must have suffix_decoding_min_token_prob from 0 to 1",
        ),
        (
            '{"method": "suffix", "suffix_decoding_max_spec_factor": 0}',
            "must have suffix_decoding_max_spec_factor from 0.01 to 1024",
        ),
        ("{}", "must have num_speculative_tokens"),
        ('{"num_speculative_tokens": 0}', "must have num_speculative_tokens from 1 to 128"),
        ('{"num_speculative_tokens": true}', "must have num_speculative_tokens from 1 to 128"),
        ('{"num_speculative_tokens": 2, "num_rows": -1}', "must have num_rows from 0"),
        (
            '{"num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3}',
            "must have prompt_lookup_min of at most prompt_lookup_max 3",
        ),
    ],
)
def test_invalid_values_are_named(text: str, problem: str) -> None:
    assert str(speculative_config_problem(text)).startswith(problem)
