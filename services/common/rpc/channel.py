"""Client channels as every service opens them: bounded buffers, keepalive, quick reconnects."""

from typing import TYPE_CHECKING

import grpc

from services.common.rpc.addresses import is_unix_address, unix_path
from services.common.rpc.forwarding_channel import ForwardingChannel
from services.common.rpc.local_channel import LocalChannel
from services.common.rpc.message_limits import LOOKAHEAD_BYTES, MAX_MESSAGE_BYTES
from services.common.rpc.renewing_channel import RenewingChannel

if TYPE_CHECKING:
    from services.common.tls.credentials import Tls

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    # Time without traffic after which a ping is sent, during calls and between them. Without pings
    # a partition goes unnoticed for half a minute and more.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # How long a peer that was stopped, or gets no processor, may leave a ping unanswered. One that
    # hangs is noticed earlier by the time limits of steps, transactions and sessions.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # How long its machine may leave a packet unacknowledged (TCP_USER_TIMEOUT).
    ("grpc.keepalive_timeout_ms", 5_000),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A service that comes back is found again within a quarter of a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # The time in which a connection and its TLS must be established, in spite of the name: a delay
    # between attempts only where each takes as long.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Channels to one address would share a connection, and so would one made since it is broken.
    ("grpc.use_local_subchannel_pool", 1),
    # Otherwise a stream that is read slowly gets megabytes of buffer in this process.
    ("grpc.http2.bdp_probe", 0),
)


def open_channel(
    address: str, tls: "Tls | None" = None, *, lookahead_bytes: int = LOOKAHEAD_BYTES
) -> ForwardingChannel:
    """A channel to host:port or unix:PATH. It connects when it is first used, with `tls` unless it
    is to a socket of this machine; there streams both ways have sockets of their own.

    Of each stream the peer sends `lookahead_bytes` ahead of what is read here, and the rest of a
    message that has begun once it is waited for.
    """
    options = (*CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", lookahead_bytes))
    if tls is not None and not is_unix_address(address):
        return tls.channel(address, options)
    channel = RenewingChannel(
        lambda: grpc.aio.insecure_channel(address, options=options), lambda: None
    )
    if is_unix_address(address):
        return LocalChannel(channel, unix_path(address), lookahead_bytes)
    return channel
