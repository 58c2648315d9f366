"""The draw on the device: sampling/race.py in torch.

Exponentials and speeds are the same as on the host, in float64. All tokens are computed, because
the host would have to wait for the device to skip blocks of tokens.
"""

import torch

from services.worker.sampling.race import (
    BLOCK_SIZE,
    GAMMA,
    LAST_SHIFT,
    MIX,
    NUM_LANES,
    NUMBER_SHIFT,
    NUMBER_UNIT,
    SUPERBLOCK_SIZE,
)

_TOKENS_AT_ONCE = 2**23


def race_on_device(
    logits: torch.Tensor, largest: torch.Tensor, temperatures: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    """Draws a token for each row of the logits float32 [R, V]. Returns int64 [R, 1].

    `largest`, float32 [R, 1]: each row's largest logit. `temperatures`, float32 [R, 1], above 0.
    `states`, int64 [R, 2]: each row's random states. A logit of minus infinity bans a token.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // SUPERBLOCK_SIZE) * NUM_LANES
    random = _words(states[:, :1], torch.arange(num_blocks, device=logits.device))
    smallest, indexes = _exponentials(random) / BLOCK_SIZE, random & (BLOCK_SIZE - 1)
    speeds, winners = [], []
    width = max(_TOKENS_AT_ONCE // num_rows, 1)
    for start in range(0, vocab_size, width):
        part = logits[:, start : start + width]
        ids = torch.arange(start, start + part.shape[1], device=logits.device)
        block = ids // SUPERBLOCK_SIZE * NUM_LANES + ids % NUM_LANES
        times = _exponentials(_words(states[:, 1:], ids))
        times.masked_fill_(indexes[:, block] == ids % SUPERBLOCK_SIZE // NUM_LANES, 0)
        times += smallest[:, block]
        speed, winner = (((part - largest) / temperatures) - times.log_()).max(dim=1, keepdim=True)
        speeds.append(speed)
        winners.append(winner + start)
    return torch.cat(winners, dim=1).gather(1, torch.cat(speeds, dim=1).argmax(1, keepdim=True))


def _words(states: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """The random words of race.py. Unsigned arithmetic is done in int64: products wrap around, and
    the sign bits that a shift copies are cleared.
    """
    mixed = states + indexes * _signed(GAMMA)
    for shift, factor in MIX:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return torch.bitwise_xor(mixed, _shifted(mixed, LAST_SHIFT))


def _exponentials(random: torch.Tensor) -> torch.Tensor:
    return _shifted(random, NUMBER_SHIFT).double().add_(0.5).mul_(NUMBER_UNIT).log_().neg_()


def _shifted(words: torch.Tensor, shift: int) -> torch.Tensor:
    return torch.bitwise_and(words >> shift, 2 ** (64 - shift) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
