"""A part of a prompt, such as an image, whose embeddings an encoder computes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An item that occupies `length` prompt tokens from position `offset` on. `embeds` lists the
    positions in the item at which an embedding replaces the token. None means all positions.
    """

    identifier: str
    """Identifies the item's content. Items with equal content have equal identifiers."""
    offset: int
    length: int
    embeds: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """The prompt position after the item's last token."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """The number of embeddings that the encoder computes for the item."""
        return self.length if self.embeds is None else len(self.embeds)

    def has_embeds_between(self, start: int, end: int) -> bool:
        """Whether an embedding of the item is at a prompt position in range(start, end)."""
        start, end = max(start, self.offset), min(end, self.end)
        if self.embeds is None:
            return start < end
        return any(start <= self.offset + position < end for position in self.embeds)
