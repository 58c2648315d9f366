"""A piece of a prompt, such as an image, whose embeddings an encoder computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An item of a prompt. It takes `length` tokens from `offset` on; at those positions of them
    that `embeds` lists, counted from 0, an embedding stands in place of a token. None: at all.
    """

    identifier: str
    """Identifier of its content: equal items have equal ones."""
    offset: int
    length: int
    embeds: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings that the encoder makes of it."""
        return self.length if self.embeds is None else len(self.embeds)

    def has_embeds_between(self, start: int, end: int) -> bool:
        """Whether one of its embeddings stands at a position of the prompt from `start` up to
        `end`.
        """
        start, end = max(start, self.offset), min(end, self.end)
        if self.embeds is None:
            return start < end
        return any(start <= self.offset + position < end for position in self.embeds)
