"""Prompts of embeddings are validated when they are read."""

import base64
import json

import pytest
import torch
from safetensors.torch import save

from services.common.errors import InvalidArgument
from services.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from services.gateway.adapters.http.openai.embeds import read_prompt_embeds

MATRIX = torch.arange(6).view(2, 3)


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def file_of(header: object, numbers: bytes = bytes(24)) -> str:
    raw = json.dumps(header).encode()
    return encoded(len(raw).to_bytes(8, "little") + raw + numbers)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, EmbedsDtype.FLOAT32),
        (torch.bfloat16, EmbedsDtype.BFLOAT16),
        (torch.float16, EmbedsDtype.FLOAT16),
    ],
)
def test_a_matrix_in_each_number_type(stored: torch.dtype, dtype: EmbedsDtype) -> None:
    matrix = MATRIX.to(stored)
    embeds = read_prompt_embeds(encoded(save({"any name": matrix}, {"format": "pt"})))
    assert (embeds.num_tokens, embeds.dtype) == (2, dtype)
    assert embeds.data == matrix.view(torch.uint8).numpy().tobytes()
    embeds.check(3)
    with pytest.raises(InvalidArgument, match="2 rows of 4 numbers"):
        embeds.check(4)


ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}

REFUSED = {
    "is not base64": "%%%",
    "is not a safetensors file": encoded(b"short"),
    "must hold one tensor, not 2": encoded(save({"a": MATRIX.float(), "b": MATRIX.float()})),
    "must hold one tensor, not 0": file_of({"__metadata__": {}}),
    "must hold a matrix in F32, BF16 or F16, and 'a' is none": encoded(save({"a": MATRIX})),
    "is cut short": file_of({"a": ENTRY}, bytes(20)),
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_is_none_is_refused(problem: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_prompt_embeds(REFUSED[problem])
    assert caught.value.message == f"prompt_embeds {problem}"
    assert caught.value.field == "prompt_embeds"


@pytest.mark.parametrize(
    "header",
    [
        [],
        "text",
        {"a": []},
        {"a": {**ENTRY, "shape": [6]}},
        {"a": {**ENTRY, "shape": ["2", "3"]}},
        {"a": {**ENTRY, "shape": [2.0, 3]}},
        {"a": {**ENTRY, "shape": [2, 3.0]}},
        {"a": {**ENTRY, "shape": [True, 6]}},
        {"a": {**ENTRY, "shape": [6, True]}},
        {"a": {**ENTRY, "shape": [2, 3, 1]}},
        {"a": {**ENTRY, "dtype": []}},
        {"a": {**ENTRY, "data_offsets": [False, 24]}},
        {"a": {**ENTRY, "data_offsets": [0, 24.0]}},
        {"a": {**ENTRY, "data_offsets": [-24, 24]}},
        {"a": {**ENTRY, "data_offsets": None}},
        {"a": {**ENTRY, "shape": [-2, -3]}},
        {"a": {**ENTRY, "shape": [10**15, 0], "data_offsets": [0, 0]}},
    ],
)
def test_no_header_gets_further(header: object) -> None:
    with pytest.raises(InvalidArgument):
        read_prompt_embeds(file_of(header))


def test_rows_without_numbers_stand_for_nothing() -> None:
    with pytest.raises(InvalidArgument, match="1000000000 rows in 4 bytes"):
        PromptEmbeds(10**9, EmbedsDtype.FLOAT32, bytes(4))


def test_a_length_beyond_the_file() -> None:
    with pytest.raises(InvalidArgument, match="is not a safetensors file"):
        read_prompt_embeds(encoded((2**63).to_bytes(8, "little") + b"{}"))


STORED = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("number", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 70_000, 199_999])
def test_numbers_that_are_not_finite_are_refused(
    stored: torch.dtype, number: float, place: int
) -> None:
    matrix = torch.zeros(200_000).to(stored)
    matrix[place] = number
    with pytest.raises(InvalidArgument, match="prompt_embeds holds NaN or infinity") as caught:
        read_prompt_embeds(encoded(save({"a": matrix.view(2, -1)})))
    assert caught.value.field == "prompt_embeds"


@pytest.mark.parametrize("stored", STORED)
def test_the_largest_and_the_smallest_numbers_are_finite(stored: torch.dtype) -> None:
    info = torch.finfo(stored)
    row = torch.tensor([info.max, info.min, info.tiny, -info.tiny, info.eps, -1.0, 0.0, -0.0])
    matrix = row.to(stored).repeat(3, 1)
    assert read_prompt_embeds(encoded(save({"a": matrix}))).num_tokens == 3
