"""Addresses in settings are split into host and port, joined, and refused if they are invalid."""

import pytest

from services.common.rpc.addresses import (
    is_connect_address,
    is_dns_address,
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


@pytest.mark.parametrize("address", ["10.0.0.7:9001", "[::1]:9001", "name:80", "unix:/run/s.sock"])
def test_what_can_be_connected_to(address: str) -> None:
    assert is_connect_address(address) is None


@pytest.mark.parametrize("address", ["0.0.0.0:9001", "[::]:9001", ":9001", "[::0]:1", "name:0"])
def test_what_a_server_may_listen_on_and_no_client_can_connect_to(address: str) -> None:
    assert is_listen_address(address) is None
    assert is_connect_address(address) == (
        "must be an address that can be connected to, host:port or unix:PATH"
    )


def test_a_name_in_dns_has_a_port() -> None:
    assert is_dns_address("dns:schedulers.default.svc:9001") is None
    for address in ("dns:name", "dns::9001", "dns:///name:9001", "dns:name:x", "dns:a:b:1"):
        assert is_dns_address(address) == "must be dns:NAME:PORT"
