"""Validates a whole transaction before any of it is applied."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from services.common.pool import operations as ops
from services.common.pool.ids import RequestKey
from services.kvpool.core.errors import RequestAlreadyAdmitted, RequestNotAdmitted


class TransactionValidator:
    """Checks a transaction as if enough blocks were free. Tracks which requests would have blocks.
    Executing a transaction that passes these checks raises no error, even if the transaction stops
    early because blocks are missing. The validator changes nothing in the pool.
    """

    def __init__(self, admitted: AbstractSet[RequestKey], num_blocks: int) -> None:
        self._admitted = admitted
        self._num_blocks = num_blocks
        self._arrived: set[RequestKey] = set()
        self._departed: set[RequestKey] = set()

    def validate(self, operations: Sequence[ops.Operation]) -> None:
        """Raises MalformedTransaction, RequestNotAdmitted or RequestAlreadyAdmitted."""
        for index, operation in enumerate(operations):
            match operation:
                case ops.Grow():
                    self._grow(operation, f"operations[{index}].grow")
                case ops.Commit():
                    self._commit(operation, f"operations[{index}].commit")
                case ops.Release():
                    if operation.contexts:
                        where = f"operations[{index}].release"
                        _require_parallel(operation.requests, operation.contexts, where, "contexts")
                    self._arrived.difference_update(operation.requests)
                    self._departed.update(operation.requests)
                case ops.RemoveSkippedBlocks(requests, num_computed_tokens):
                    where = f"operations[{index}].remove_skipped_blocks"
                    _require_parallel(requests, num_computed_tokens, where, "num_computed_tokens")
                case ops.Lookup():
                    self._lookup(operation, f"operations[{index}].lookup")
                case ops.Admit():
                    for item, admission in enumerate(operation.admissions):
                        where = f"operations[{index}].admit.admissions[{item}]"
                        self._admission(admission, where)
                case ops.EvictBlocks():
                    self._evict(operation, f"operations[{index}].evict_blocks")

    def _grow(self, grow: ops.Grow, where: str) -> None:
        _require_parallel(grow.requests, grow.num_slots, where, "num_slots")
        _require_parallel(grow.requests, grow.num_computed_tokens, where, "num_computed_tokens")
        if grow.num_tokens:
            _require_parallel(grow.requests, grow.num_tokens, where, "num_tokens")
        self._require_admitted(grow.requests, where)

    def _commit(self, commit: ops.Commit, where: str) -> None:
        _require_parallel(commit.requests, commit.num_tokens, where, "num_tokens")
        _require_parallel(commit.requests, commit.new_hashes, where, "num_new_hashes")
        self._require_admitted(commit.requests, where)

    def _lookup(self, lookup: ops.Lookup, where: str) -> None:
        _require_parallel(lookup.requests, lookup.max_hit_tokens, where, "max_hit_tokens")
        _require_parallel(lookup.requests, lookup.new_hashes, where, "num_new_hashes")
        for item, request in enumerate(lookup.requests):
            self._require_waiting(request, f"{where}.requests[{item}]")

    def _admission(self, admission: ops.Admission, where: str) -> None:
        if admission.holds_blocks:
            self._require_admitted([admission.request], where)
        else:
            self._require_waiting(admission.request, f"{where}.request")
        if admission.num_hit_tokens > admission.max_hit_tokens:
            raise ops.MalformedTransaction(
                f"num_hit_tokens is {admission.num_hit_tokens}, more than max_hit_tokens, "
                f"{admission.max_hit_tokens}",
                field=f"{where}.num_hit_tokens",
            )
        if admission.num_slots < admission.num_computed_tokens:
            raise ops.MalformedTransaction(
                f"num_slots is {admission.num_slots}, too few for {admission.num_hit_tokens} "
                f"tokens of the hit and {admission.num_external_tokens} loaded tokens",
                field=f"{where}.num_slots",
            )
        num_stored = admission.num_stored_tokens
        if num_stored is not None and num_stored > admission.num_computed_tokens:
            raise ops.MalformedTransaction(
                f"num_stored_tokens is {num_stored}, more than the {admission.num_computed_tokens} "
                "computed tokens",
                field=f"{where}.num_stored_tokens",
            )
        if admission.holds_blocks and admission.num_external_tokens:
            raise ops.MalformedTransaction(
                "num_external_tokens must be 0 for a request that holds blocks",
                field=f"{where}.num_external_tokens",
            )
        self._arrived.add(admission.request)

    def _evict(self, evict: ops.EvictBlocks, where: str) -> None:
        for item, block in enumerate(evict.block_ids):
            if not 0 < block < self._num_blocks:
                raise ops.MalformedTransaction(
                    f"block {block} does not exist: block ids are from 1 to {self._num_blocks - 1}",
                    field=f"{where}.block_ids[{item}]",
                )

    def _require_admitted(self, requests: Sequence[RequestKey], where: str) -> None:
        admitted, arrived, departed = self._admitted, self._arrived, self._departed
        if not departed and admitted >= set(requests):
            return
        for item, request in enumerate(requests):
            if request not in arrived and (request not in admitted or request in departed):
                raise RequestNotAdmitted(
                    f"request {request} holds no blocks", field=f"{where}.requests[{item}]"
                )

    def _require_waiting(self, request: RequestKey, field: str) -> None:
        if request in self._arrived or (
            request in self._admitted and request not in self._departed
        ):
            raise RequestAlreadyAdmitted(f"request {request} already holds blocks", field=field)


def _require_parallel(
    requests: Sequence[object], values: Sequence[object], where: str, name: str
) -> None:
    if len(requests) != len(values):
        raise ops.MalformedTransaction(
            f"{len(values)} values for {len(requests)} requests", field=f"{where}.{name}"
        )
