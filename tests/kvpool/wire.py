"""Short builders for protobuf messages to the pool."""

from collections.abc import Sequence

import grpc
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2

from services.common.rpc import status
from services.common.rpc.protocol import own_release
from tests.kvpool.worked_examples import BLOCK_SIZE, hashes

SECONDS = 60.0


def open_request(
    pool_id: str = "replica", num_blocks: int = 10, **fields: object
) -> kvpool_pb2.OpenPoolRequest:
    group = common_pb2.KVCacheGroup(
        attention_type=common_pb2.ATTENTION_TYPE_FULL, block_size=BLOCK_SIZE, num_layers=2
    )
    defaults: dict[str, object] = {
        "groups": [group],
        "enable_prefix_caching": True,
        "release": own_release(),
    }
    return kvpool_pb2.OpenPoolRequest(pool_id=pool_id, num_blocks=num_blocks, **(defaults | fields))


def packed(path: str) -> bytes:
    return b"".join(hashes(path))


def release(*requests: int) -> kvpool_pb2.Operation:
    return kvpool_pb2.Operation(release=kvpool_pb2.Release(requests=requests))


def grow(requests: Sequence[int], num_slots: Sequence[int]) -> kvpool_pb2.Operation:
    return kvpool_pb2.Operation(
        grow=kvpool_pb2.Grow(
            requests=requests, num_computed_tokens=[0] * len(requests), num_slots=num_slots
        )
    )


def lookup(request: int, max_hit_tokens: int, path: str) -> kvpool_pb2.Operation:
    return kvpool_pb2.Operation(
        lookup=kvpool_pb2.Lookup(
            requests=[request],
            max_hit_tokens=[max_hit_tokens],
            num_new_hashes=[len(path)],
            new_hashes=packed(path),
        )
    )


def admit(*admissions: kvpool_pb2.Admission) -> kvpool_pb2.Operation:
    return kvpool_pb2.Operation(admit=kvpool_pb2.Admit(admissions=admissions))


def admission(
    request: int, num_tokens: int, *, hit: int = 0, path: str = "", traceparent: str = ""
) -> kvpool_pb2.Admission:
    return kvpool_pb2.Admission(
        request=request,
        max_hit_tokens=num_tokens - 1,
        num_hit_tokens=hit,
        num_slots=num_tokens,
        num_commit_tokens=num_tokens,
        num_reserve_slots=num_tokens,
        new_hashes=packed(path),
        traceparent=traceparent,
    )


def reset() -> kvpool_pb2.Operation:
    return kvpool_pb2.Operation(reset_prefix_cache=kvpool_pb2.ResetPrefixCache())


class Speaker:
    """A transaction stream that numbers its messages."""

    def __init__(self, stub: object, generation: int, pool_id: str = "replica") -> None:
        self._call = stub.Transact()
        self._pool_id = pool_id
        self.generation = generation
        self.sequence = 0

    async def transact(
        self, *operations: kvpool_pb2.Operation, traceparent: str = ""
    ) -> kvpool_pb2.TransactResponse:
        self.sequence += 1
        return await self.send(self.sequence, *operations, traceparent=traceparent)

    async def send(
        self, sequence: int, *operations: kvpool_pb2.Operation, traceparent: str = ""
    ) -> kvpool_pb2.TransactResponse:
        await self._call.write(
            kvpool_pb2.TransactRequest(
                pool_id=self._pool_id,
                generation=self.generation,
                sequence=sequence,
                operations=operations,
                traceparent=traceparent,
            )
        )
        return await self.read()

    async def read(self) -> kvpool_pb2.TransactResponse:
        try:
            return await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise status.from_rpc_error(error) from error

    async def end(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF
        assert await self._call.code() is grpc.StatusCode.OK

    def break_off(self) -> None:
        self._call.cancel()
