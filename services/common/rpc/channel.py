"""Client channels of all services. They have bounded buffers and keepalive, and reconnect fast."""

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
    # a network partition stays undetected for half a minute or more.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Time for which a peer may leave a ping unanswered, for example because it is stopped or
    # starved. The time limits of steps, transactions and sessions detect a hung peer earlier.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Time for which the peer's machine may leave a packet unacknowledged (TCP_USER_TIMEOUT).
    ("grpc.keepalive_timeout_ms", 5_000),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted service is reconnected within a quarter of a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Despite its name, the time in which a connection and its TLS must be established. It delays
    # attempts only if each attempt takes this long.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Without this, channels to one address would share a connection, even a broken one.
    ("grpc.use_local_subchannel_pool", 1),
    # Without this, a slowly read stream gets a buffer of megabytes in this process.
    ("grpc.http2.bdp_probe", 0),
)


def open_channel(
    address: str, tls: "Tls | None" = None, *, lookahead_bytes: int = LOOKAHEAD_BYTES
) -> ForwardingChannel:
    """Creates a channel to host:port or unix:PATH, which connects at its first use. `tls` is not
    used for Unix sockets. For a Unix socket, each bidirectional stream has a separate socket. On
    each stream the peer may send `lookahead_bytes` bytes that are not read yet. The rest of a
    longer message is sent once its reader waits for it.
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
