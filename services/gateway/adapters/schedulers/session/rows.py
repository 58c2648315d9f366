"""Checks the numbers that a model computed: log-probabilities and vectors."""

import math
from array import array
from collections.abc import Sequence

from stepwell.common.v1 import common_pb2

from services.gateway.adapters.schedulers.session.wrong_message import require

_ROUNDING = 0.01
"""A log-probability may exceed 0 by this amount, due to rounding."""
FLOAT_BYTES = 4


def check_rows(
    rows: common_pb2.Logprobs, token_ids: Sequence[int], num_top: int, vocab_size: int
) -> None:
    """Raises WrongMessage unless `rows` has exactly one valid row for each token. A row has the
    token itself, then the `num_top` most probable tokens in descending order.
    """
    width, num_rows = 1 + num_top, len(token_ids)
    cells, values, ranks = list(rows.token_ids), list(rows.logprobs), list(rows.ranks)
    require(
        rows.width == width, f"rows of log-probabilities have {rows.width} columns, not {width}"
    )
    is_whole = len(ranks) == num_rows and len(cells) == len(values) == num_rows * width
    require(
        is_whole, f"{num_rows} tokens have {len(ranks)} rows with {len(values)} log-probabilities"
    )
    if not num_rows:
        return
    require(
        cells[::width] == list(token_ids), "a row of log-probabilities belongs to another token"
    )
    require(
        max(cells) < vocab_size,
        f"token {max(cells)} has a log-probability, but the vocabulary has {vocab_size}",
    )
    require(
        min(ranks) >= 1 and max(ranks) <= vocab_size,
        f"ranks of tokens are from {min(ranks)} to {max(ranks)}, not from 1 to {vocab_size}",
    )
    require(not math.isnan(sum(values)), "a log-probability is NaN")
    require(max(values) <= _ROUNDING, f"a log-probability is {max(values)}, above 0")
    if width > 2:
        for start in range(0, len(values), width):
            best = values[start + 1 : start + width]
            top = cells[start + 1 : start + width]
            is_same = cells[start] not in top or best[top.index(cells[start])] == values[start]
            require(is_same, "a row has two different log-probabilities of one token")
            require(
                best == sorted(best, reverse=True),
                "the log-probabilities of a row are not in descending order",
            )


def check_vector(values: bytes, size: int) -> None:
    """Raises WrongMessage unless `values` are `size` finite numbers."""
    require(
        len(values) == FLOAT_BYTES * size,
        f"a prompt's vector of {size} numbers has {len(values)} bytes",
    )
    numbers = array("f", values)
    require(all(map(math.isfinite, numbers)), "a prompt's vector contains NaN or infinity")
