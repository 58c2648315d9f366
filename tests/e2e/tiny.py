"""A tiny servable model with seeded weights, a byte-level tokenizer and a chat template."""

from functools import cache
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import PostProcessor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.tiny_models import VOCAB_SIZE, edit_config, save_tiny_model

MAX_MODEL_LEN = 2048
_SPECIAL = ["<pad>", "<s>", "</s>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_servable_model(directory: Path) -> PreTrainedModel:
    """Saves a tiny Llama in fp32 with its tokenizer, and returns the model.

    Each token is one byte. Some ids of the model have no token, as in many real models.
    """
    model = save_tiny_model(directory)
    # Rotary embedding works for any position, so this changes only the maximum length.
    edit_config(directory, max_position_embeddings=MAX_MODEL_LEN)
    save_tokenizer(directory)
    return model


def save_tokenizer(directory: Path, processor: PostProcessor | None = None) -> None:
    """Saves the tokenizer, whose tokens are bytes. `processor` adds special tokens to texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet]
    assert len(tokens) < VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    if processor is not None:
        tokenizer.post_processor = processor
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)


def embed(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """The embeddings of a prompt's tokens, [num_tokens, hidden_size]."""
    with torch.inference_mode():
        return model.get_input_embeddings()(torch.tensor(prompt)).clone()


def greedy(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The greedy continuation by transformers, which does not stop at end-of-text tokens."""
    return list(_greedy(model, tuple(prompt), max_tokens))


@cache
def _greedy(model: PreTrainedModel, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Computes `greedy`. The results are cached, because tests share prompts."""
    token_ids, past = torch.tensor([prompt]), None
    output: list[int] = []
    with torch.inference_mode():
        for _ in range(max_tokens):
            answer = model(input_ids=token_ids, past_key_values=past, use_cache=True)
            past = answer.past_key_values
            token_ids = answer.logits[:, -1].argmax(-1, keepdim=True)
            output.append(int(token_ids))
    return tuple(output)
