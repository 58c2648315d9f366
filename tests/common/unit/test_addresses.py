"""Addresses in settings: taken apart, put together, and refused."""

import pytest

from services.common.addresses import (
    is_host_port,
    is_listen_address,
    join_host_port,
    split_host_port,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("127.0.0.1:9000", "127.0.0.1", 9000), ("[::1]:0", "::1", 0), ("name:80", "name", 80)],
)
def test_host_and_port_are_taken_apart_and_put_together(address: str, host: str, port: int) -> None:
    assert split_host_port(address) == (host, port)
    assert join_host_port(host, port) == address


@pytest.mark.parametrize("address", ["", "9000", "host", "host:", "host:x", "host:65536", "a:-1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    assert is_host_port(address) == "must be host:port"
    assert is_listen_address(address) == "must be host:port or unix:PATH"


def test_only_grpc_listens_on_unix_sockets() -> None:
    assert is_listen_address("unix:/run/kvpool.sock") is None
    assert is_host_port("unix:/run/kvpool.sock") == "must be host:port"
    assert is_listen_address("unix:") == "must be host:port or unix:PATH"
