"""Structured outputs. A mask over a request's logits constrains the output to a JSON schema, a
regular expression or a grammar. A matcher of llguidance computes the mask of each token.

A matcher's state depends only on the output so far. Therefore a matcher can be created again after
a preemption or the loss of a worker, and all ranks have equal matchers. Only whether a mask can be
computed may differ between ranks, because it also depends on earlier requests with the grammar, and
on the time that compiling took. If one rank cannot compute a mask, all ranks refuse the token (see
GrammarRows).
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from services.common.errors import FailedPrecondition, InvalidArgument
from services.common.request.structured_outputs import FIELD, KEPT_GRAMMARS, StructuredOutputs
from services.worker.backends.arrays import Int32Array
from services.worker.backends.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from services.common.request.grammar_compiler import GrammarCompiler

logger = logging.getLogger(__name__)

_MAX_SECONDS_IN_STEP = 0.005
"""A grammar that takes longer to compile is slow: `unshared_matcher` does not compile it again."""
_MAX_CACHED_SLOW = 256
_MAX_MASKS = 63
"""Maximum number of masks computed in a row before a token is drawn without a mask again."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    matcher: "LLMatcher"
    seconds: float
    """Processor time of the compilation."""

    @property
    def is_slow(self) -> bool:
        return self.seconds > _MAX_SECONDS_IN_STEP


class Grammars:
    """Compiles grammars, and caches recently used ones. The cache has room for more slow grammars
    than for others, because a request needs its grammar again after a preemption, and should not
    wait for it.

    The compiler is created at the first use. Thread-safe.
    """

    def __init__(
        self, make_compiler: "Callable[[], GrammarCompiler]", ranks: Ranks = ALONE
    ) -> None:
        """`make_compiler` raises FailedPrecondition if there is no suitable tokenizer. `ranks` are
        the ranks that sample the same tokens.
        """
        self.ranks = ranks
        self._make_compiler = make_compiler
        self._compiler: GrammarCompiler | None = None
        self._making = Lock()
        self._cached: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
        self._using_cache = Lock()
        self._renewing: set[StructuredOutputs] = set()
        """Slow grammars that a thread compiles again."""

    def prepare(self, wanted: StructuredOutputs) -> None:
        """Compiles a grammar if it is not cached. Raises InvalidArgument if the grammar cannot be
        compiled, and FailedPrecondition if the model has no suitable tokenizer.
        """
        self._template(wanted)

    def matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        """Returns a matcher at the beginning of an output. Raises the errors of `prepare`.

        Matchers of the same grammar share an automaton, which grows while they are used.
        """
        return self._template(wanted).matcher.deep_copy()

    def unshared_matcher(self, wanted: StructuredOutputs) -> "LLMatcher | None":
        """Returns a matcher at the beginning of an output, with a newly compiled automaton, for use
        when the shared automaton has reached its size limit. Removes the shared automaton from the
        cache. Raises the errors of `prepare`.

        Returns None for a slow grammar, because compiling it would delay a step. A thread then
        compiles a new shared automaton for later requests.
        """
        with self._using_cache:
            kept = self._cached.get(wanted)
            if kept is not None and kept.is_slow:
                if wanted not in self._renewing:
                    self._renewing.add(wanted)
                    Thread(target=self._renew, args=(wanted,), daemon=True).start()
                return None
            self._cached.pop(wanted, None)
        return self._compile(wanted).matcher

    def _renew(self, wanted: StructuredOutputs) -> None:
        try:
            compiled = self._compile(wanted)
        finally:
            with self._using_cache:
                self._renewing.discard(wanted)
        with self._using_cache:
            if wanted in self._cached:
                self._cached[wanted] = replace(compiled, seconds=self._cached[wanted].seconds)

    def _template(self, wanted: StructuredOutputs) -> _Compiled:
        with self._using_cache:
            if (kept := self._cached.get(wanted)) is not None:
                self._cached.move_to_end(wanted)
                return kept
        compiled = self._compile(wanted)
        with self._using_cache:
            kept = self._cached.setdefault(wanted, compiled)
            self._evict(compiled.is_slow, _MAX_CACHED_SLOW if compiled.is_slow else KEPT_GRAMMARS)
        return kept

    def _evict(self, is_slow: bool, most: int) -> None:
        """Removes all slow grammars, or all others, except the `most` last used of them."""
        same_kind = [key for key, kept in self._cached.items() if kept.is_slow is is_slow]
        for key in same_kind[: len(same_kind) - most]:
            del self._cached[key]

    def _compile(self, wanted: StructuredOutputs) -> _Compiled:
        with self._making:
            if self._compiler is None:
                self._compiler = self._make_compiler()
        began = time.thread_time()
        matcher = self._compiler.compile(wanted)
        return _Compiled(matcher, time.thread_time() - began)


class GrammarMask:
    """Bans the tokens with which one request's output could not conform to its grammar, and the end
    tokens while the output is incomplete.

    Computing a mask takes longer than checking one token, inside a string of bounded length a
    hundred times as long. With `draws_first`, tokens are therefore drawn without a mask and then
    checked (as in llama.cpp), as long as most of them conform. This is usual if the prompt
    describes the format.
    """

    def __init__(
        self,
        grammars: Grammars,
        wanted: StructuredOutputs,
        output: Sequence[int],
        words: Int32Array,
    ) -> None:
        """`output`: the output tokens so far. `words` [V / 32, rounded up], contiguous: memory for
        the mask of the next token, in the format of RowMasks. The mask is valid only while
        `is_made` is true.
        """
        self._grammars, self._wanted = grammars, wanted
        self._output = list(output)
        self._words = words
        self._address, self._num_bytes = words.ctypes.data, words.nbytes
        self.error = ""
        """Why the grammar allows no token any more, or empty."""
        self._matcher: LLMatcher | None = self._matcher_of_output(grammars.matcher)
        self.draws_first = False
        """Whether tokens after the next one may be drawn without a mask and then checked."""
        self.is_made = True
        """Whether the mask of the next token is computed. If not, the token must be checked."""
        self._num_masks = self._num_masks_due = 0
        """The number of masks to compute in a row after the last token that did not conform, and
        how many of these masks are still to be computed.
        """
        self._make()

    @property
    def is_complete(self) -> bool:
        """Whether only an end token may follow."""
        return self._matcher is not None and self._matcher.is_stopped()

    def forced_tokens(self) -> list[int]:
        """The tokens of the text that the grammar forces next. Empty if it allows several texts."""
        if self._matcher is None or self._matcher.is_stopped() or self._matcher.is_error():
            return []
        return self._matcher.compute_ff_tokens()

    def append(self, token_id: int) -> None:
        """Accepts the request's next token. If the token after it needs a mask, computes this mask
        at once, while the matcher's data is in the processor's caches.
        """
        self._output.append(token_id)
        if self._matcher is not None and not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        self.is_made = not self.draws_first or self._needs_mask()
        if self.is_made:
            self._make()

    def allows(self, token_id: int) -> bool:
        """Whether the mask would allow this token, drawn without it. If not, computes the mask."""
        if self._matcher is not None and _is_in_mask(self._matcher, token_id):
            self._num_masks //= 4
            return True
        self._num_masks = self._num_masks_due = min(4 * self._num_masks + 3, _MAX_MASKS)
        self.is_made = True
        self._make()
        return False

    def _needs_mask(self) -> bool:
        """Whether the next token is unlikely to conform without a mask, or must be an end token."""
        if self._num_masks_due:
            self._num_masks_due -= 1
            return True
        return self._matcher is None or self._matcher.is_stopped()

    def _make(self) -> None:
        if self._matcher is not None and not self._fill(self._matcher):
            # Other requests share the automaton, and may have grown it to its size limit.
            error = self._matcher.get_error()
            self._matcher = self._matcher_of_output(self._grammars.unshared_matcher)
            if self._matcher is None or not self._fill(self._matcher):
                # Imports llguidance, which is loaded already because there is a matcher.
                from services.common.request.grammar_compiler import (  # noqa: PLC0415
                    reason_in_words,
                )

                logger.info(
                    "the mask of a grammar cannot be computed, so its request fails: %s", error
                )
                self._matcher, self.error = None, reason_in_words(error)
        if self._matcher is None:
            self._words.fill(0)

    def _fill(self, matcher: "LLMatcher") -> bool:
        matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
        return not matcher.is_error()

    def _matcher_of_output(
        self, make: "Callable[[StructuredOutputs], LLMatcher | None]"
    ) -> "LLMatcher | None":
        """Creates a matcher, advanced over the output so far. None if `make` returns None."""
        try:
            matcher = make(self._wanted)
        except (InvalidArgument, FailedPrecondition) as error:
            logger.warning(
                "the grammar of a request cannot be compiled, so the request fails: %s",
                error.message,
            )
            self.error = error.message.removeprefix(f"{FIELD}: ")
            return None
        if matcher is None:
            return None
        for token_id in self._output:
            if matcher.is_stopped():
                break
            matcher.consume_token(token_id)
        return matcher


def _is_in_mask(matcher: "LLMatcher", token_id: int) -> bool:
    """Whether the mask of the next token would include this token. If the grammar allows only one
    text to follow, the mask includes only the first token of that text.
    """
    forced = matcher.compute_ff_tokens()
    if forced:
        return forced[0] == token_id
    return matcher.validate_tokens([token_id]) == 1


def model_compiler(
    directory: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> "GrammarCompiler":
    """Returns a compiler for the tokenizer of a model directory. Outputs end with the given tokens
    or with the tokenizer's own end token. Raises FailedPrecondition if there is no suitable
    tokenizer.
    """
    # Imported only when needed, because most workers serve no grammar.
    from services.common.request.grammar_compiler import GrammarCompiler  # noqa: PLC0415

    try:
        text = _tokenizer_json(directory)
        own = _own_eos_token_id(directory, text)
        ending = {*eos_token_ids, *([] if own is None or own >= vocab_size else [own])}
        return GrammarCompiler(text, vocab_size, sorted(ending))
    except (OSError, ValueError) as error:
        raise FailedPrecondition(
            f"structured outputs are not available with this model's tokenizer: {error}"
        ) from error


def _tokenizer_json(directory: Path) -> str:
    path = directory / "tokenizer.json"
    if path.is_file():
        return path.read_text()
    # Imported only for tokenizers without tokenizer.json, because importing transformers takes
    # seconds.
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    text: str = tokenizer.backend_tokenizer.to_str()
    return text


def _own_eos_token_id(directory: Path, tokenizer_json: str) -> int | None:
    path = directory / "tokenizer_config.json"
    named = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
    content = named.get("content") if isinstance(named, dict) else named
    described = json.loads(tokenizer_json)
    for token in described.get("added_tokens", ()):
        if token["content"] == content:
            return int(token["id"])
    vocabulary = described["model"].get("vocab")
    found = vocabulary.get(content) if isinstance(vocabulary, dict) else None
    return None if found is None else int(found)
