"""Opens the services' client channels, with bounded buffers, keepalive and fast reconnects."""

import grpc

from services.common.rpc.addresses import is_unix_address, unix_path
from services.common.rpc.forwarding_channel import ForwardingChannel
from services.common.rpc.local_channel import LocalChannel
from services.common.rpc.message_limits import LOOKAHEAD_BYTES, MAX_MESSAGE_BYTES
from services.common.rpc.renewing_channel import RenewingChannel
from services.common.tls.credentials import Tls

KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    # Time without traffic after which a ping is sent, also while there are no calls. Without pings
    # a network partition stays undetected for half a minute or more.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Time within which a peer must acknowledge a ping. It is long enough for a starved peer. A hung
    # peer is detected earlier, by the time limits of steps, transactions and gateways' streams.
    ("grpc.http2.ping_timeout_ms", 20_000),
    # Time within which the peer's machine must acknowledge a packet (TCP_USER_TIMEOUT).
    ("grpc.keepalive_timeout_ms", 5_000),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *KEEPALIVE_OPTIONS,
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted service is reconnected within a quarter of a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    # Limit on the time of an attempt to connect, TLS included. Despite the option's name, it does
    # not delay the next attempt after a failure.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Otherwise channels to one address would share a connection, even a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    # Otherwise grpc buffers megabytes of a stream that this process reads slowly.
    ("grpc.http2.bdp_probe", 0),
)


def open_channel(
    address: str,
    tls: Tls | None = None,
    *,
    lookahead_bytes: int = LOOKAHEAD_BYTES,
    max_sent_bytes: int = MAX_MESSAGE_BYTES,
) -> ForwardingChannel:
    """Creates a channel to host:port or unix:PATH, which connects at its first use. `tls` is not
    used for Unix sockets. With a Unix socket, each bidirectional stream has a separate connection.
    On each stream the peer may send `lookahead_bytes` bytes that are not read yet. The rest of a
    longer message is sent once a reader waits for the message. A message to the server has at most
    `max_sent_bytes` bytes.
    """
    options = (
        *CHANNEL_OPTIONS,
        ("grpc.http2.lookahead_bytes", lookahead_bytes),
        ("grpc.max_send_message_length", max_sent_bytes),
    )
    if tls is not None and not is_unix_address(address):
        return tls.channel(address, options)
    channel = RenewingChannel(
        lambda: grpc.aio.insecure_channel(address, options=options), lambda: None
    )
    if is_unix_address(address):
        return LocalChannel(channel, unix_path(address), lookahead_bytes, max_sent_bytes)
    return channel
