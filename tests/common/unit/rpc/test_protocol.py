"""Releases are compatible: the contracts do not change without a new protocol number."""

import hashlib
from importlib.metadata import version

import pytest
from google.protobuf import descriptor_pb2
from stepwell.common.v1 import common_pb2
from stepwell.kvpool.v1 import kvpool_pb2
from stepwell.scheduler.v1 import scheduler_pb2
from stepwell.worker.v1 import worker_pb2

from services.common.rpc.protocol import PROTOCOL, OtherProtocol, own_release, require_same_protocol

CONTRACTS_DIGEST = "03029b485783d69326a628ee1c2d2da092d4640d60b8911e61ed6c2a8a2f27b8"
"""The digest of the protobuf contracts between services. When they change, decide by the docstring
of PROTOCOL whether the number must be raised, and set the new digest.
"""


def test_services_of_one_protocol_work_together_whatever_their_versions() -> None:
    theirs = common_pb2.Release(protocol=PROTOCOL, version="0.9.1")
    require_same_protocol("the gateway", theirs, "scheduler")


@pytest.mark.parametrize(
    ("theirs", "shown"),
    [
        (common_pb2.Release(protocol=99, version="9.0.0"), "version 9.0.0 (protocol 99)"),
        (common_pb2.Release(), "a version without a protocol number"),
    ],
)
def test_another_protocol_is_refused_with_both_versions(
    theirs: common_pb2.Release, shown: str
) -> None:
    with pytest.raises(OtherProtocol) as refused:
        require_same_protocol("the gateway", theirs, "scheduler")
    assert refused.value.message == (
        f"this scheduler has version {version('stepwell')} (protocol {PROTOCOL}), the gateway "
        f"{shown}: services of different protocols do not work together"
    )


def test_a_release_names_the_protocol_and_the_version_of_the_package() -> None:
    assert own_release() == common_pb2.Release(protocol=PROTOCOL, version=version("stepwell"))


def test_the_contracts_are_those_that_the_protocol_was_decided_for() -> None:
    digest = hashlib.sha256()
    for contract in (common_pb2, kvpool_pb2, scheduler_pb2, worker_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        contract.DESCRIPTOR.CopyToProto(file)
        digest.update(file.SerializeToString(deterministic=True))
    assert digest.hexdigest() == CONTRACTS_DIGEST, (
        "the contracts between services have changed: see CONTRACTS_DIGEST"
    )
