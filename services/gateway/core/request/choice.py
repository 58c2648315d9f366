"""One answer in progress: converts the answer's tokens to text."""

from dataclasses import dataclass, field

from services.common.request.finish import FinishReason
from services.gateway.core.ports import Tokenizer
from services.gateway.core.request.delta import Delta
from services.gateway.core.request.logprobs import LogprobRows
from services.gateway.core.request.request import ClientRequest, EngineRequest
from services.gateway.core.text.detokenizer import new_detokenizer
from services.gateway.core.text.parsing.events import CallStart, OutputEvent
from services.gateway.core.text.stop_strings import StopPatterns, StopStrings


@dataclass(slots=True)
class Piece:
    """An addition to one answer: text, tokens, or the answer's end."""

    index: int
    text: str = ""
    """Complete characters that can no longer become part of a stop string."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    """One row for each token. It is None if log-probabilities were not requested."""
    offsets: list[int] | None = None
    """For each token, the number of characters before it in the answer. It is None if the tokens
    were converted to text together, so that the tokens' positions are not known.
    """
    prompt_logprobs: LogprobRows | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended the answer."""
    pooled: bytes | None = None
    """The vector of the prompt as little-endian float32 numbers."""
    events: list[OutputEvent] | None = None
    """The events (content, reasoning and tool calls) that were parsed from the text. It is None if
    the whole text is content, because the request has no `output_form`.
    """

    @property
    def is_empty(self) -> bool:
        """Whether the piece has neither tokens, prompt log-probabilities, nor the answer's end."""
        return not self.token_ids and self.finish_reason is None and self.prompt_logprobs is None

    @property
    def is_text(self) -> bool:
        """Whether the piece has text, and nothing else except the text's tokens."""
        return bool(self.text) and (
            self.finish_reason is None
            and self.logprobs is None
            and self.prompt_logprobs is None
            and self.events is None
        )


class Choice:
    """Converts the deltas (new output) of one sequence to pieces of an answer, and ends the answer
    at a stop string.

    The answer does not depend on how tokens were grouped into deltas. The text of an
    end-of-sequence or stop token that ended the sequence is omitted, unless the request has
    include_stop_str_in_output.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        request: ClientRequest,
        sequence: EngineRequest,
        stops: StopPatterns,
    ) -> None:
        sampling = sequence.sampling
        self.index = index
        self.num_prompt_tokens = len(sequence.prompt_token_ids)
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.called: list[str] = []
        """Names of the tools that the answer has called so far."""
        self._detokenizer = new_detokenizer(
            tokenizer,
            sequence.prompt_token_ids if sequence.prompt_embeds is None else (),
            skip_special_tokens=request.skip_special_tokens,
            shown=request.shown_special_ids,
        )
        self._min_tokens = sampling.min_tokens
        self._prompt_only = request.prompt_only
        self._include_stop = request.include_stop_str_in_output
        self._final_ids = frozenset(sampling.stop_token_ids + sampling.eos_token_ids)
        self._stops = StopStrings(stops, include=self._include_stop) if request.stop else None
        form = request.output_form
        self._parser = None if form is None else form.make_parser()
        self._counts_each = (
            self._stops is not None or sampling.logprobs is not None or form is not None
        )

    def accept(self, delta: Delta) -> Piece:
        """Converts a delta to a piece. Must not be called after `finish_reason` is set."""
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if self._prompt_only:
            return self._accept_prompt_only(delta)
        if delta.finish is None and not self._counts_each:
            text = self._plain_text(delta.token_ids)
            return Piece(
                self.index,
                text,
                delta.token_ids,
                prompt_logprobs=delta.prompt_logprobs,
                pooled=delta.pooled,
            )
        events: list[OutputEvent] | None = None if self._parser is None else []
        if not self._counts_each:
            text, num_tokens, offsets, stop = self._plain_text(delta.token_ids), None, None, None
        else:
            text, num_tokens, offsets, stop = self._text_token_by_token(delta.token_ids, events)
        rest = ""
        if stop is None and delta.finish is not None:
            rest, stop = self._rest()
        reason, stop_reason = self._finish(delta, stop)
        text += rest
        if self._parser is not None and events is not None and reason is not None:
            is_cut = reason is not FinishReason.STOP
            events += [*self._parser.feed(rest), *self._parser.finish(is_cut=is_cut)]
        self.called += [event.name for event in events or () if isinstance(event, CallStart)]
        tokens = delta.token_ids if num_tokens is None else delta.token_ids[:num_tokens]
        logprobs = delta.logprobs
        if logprobs is not None and len(logprobs) > len(tokens):
            logprobs = logprobs.part(0, len(tokens))
        return Piece(
            self.index,
            text,
            tokens,
            logprobs,
            offsets,
            delta.prompt_logprobs,
            reason,
            stop_reason,
            delta.pooled,
            events,
        )

    def _accept_prompt_only(self, delta: Delta) -> Piece:
        if delta.finish is not None:
            self.finish_reason = FinishReason.LENGTH
        return Piece(
            self.index, prompt_logprobs=delta.prompt_logprobs, finish_reason=self.finish_reason
        )

    def _plain_text(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        self.num_output_tokens += len(token_ids)
        if self._is_final(token_ids[-1]):
            return self._detokenizer.feed(token_ids[:-1])
        return self._detokenizer.feed(token_ids)

    def _text_token_by_token(
        self, token_ids: list[int], events: list[OutputEvent] | None
    ) -> tuple[str, int, list[int], str | None]:
        """Returns the visible text, the number of tokens up to the stop string, the position in
        characters at which each token's text starts, and the stop string. Without a stop string,
        the number includes all tokens and the stop string is None.

        Appends the events that are parsed from the text to `events`.
        """
        shown: list[str] = []
        offsets: list[int] = []
        for count, token in enumerate(token_ids, start=1):
            self.num_output_tokens += 1
            offsets.append(self._detokenizer.num_characters)
            text = "" if self._is_final(token) else self._detokenizer.feed((token,))
            stop = None
            if self._stops is not None:
                text, stop = self._stops.feed(text, may_end=self._may_stop)
            shown.append(text)
            self._parse(text, events)
            if stop is not None:
                return "".join(shown), count, offsets, stop
        return "".join(shown), len(token_ids), offsets, None

    def _parse(self, text: str, events: list[OutputEvent] | None) -> None:
        if self._parser is None or events is None:
            return
        if text:
            events += self._parser.feed(text)
        self.num_reasoning_tokens += self._parser.in_reasoning

    @property
    def _may_stop(self) -> bool:
        """Whether a stop string that the last token completes ends the answer."""
        return self.num_output_tokens > self._min_tokens

    def _is_final(self, token_id: int) -> bool:
        return (
            token_id in self._final_ids
            and self.num_output_tokens >= self._min_tokens
            and not self._include_stop
        )

    def _finish(
        self, delta: Delta, stop: str | None
    ) -> tuple[FinishReason | None, str | int | None]:
        if stop is not None:
            self.finish_reason = FinishReason.STOP
            return self.finish_reason, stop
        if delta.finish is None:
            return None, None
        self.finish_reason = delta.finish.reason
        return self.finish_reason, delta.finish.stop_token_id

    def _rest(self) -> tuple[str, str | None]:
        """Returns the visible text that was held back until the end, and the stop string that it
        completes, or None.
        """
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, None
        text, stop = self._stops.feed(text, may_end=self._may_stop)
        return text + self._stops.flush(), stop
