"""The gateway's settings for clients: limits on requests, answers and waiting times."""

from dataclasses import dataclass

from services.common.process.service_settings import ServiceSettings
from services.common.process.settings import at_least, between, one_of, setting
from services.common.rpc.message_limits import MAX_MESSAGE_BYTES
from services.gateway.adapters.http.exchange.ignored_fields import IGNORE, REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(ServiceSettings):
    """The part of GatewaySettings that concerns clients."""

    max_concurrent_requests: int = setting(
        1024, doc="client requests served at once; others get 503", check=at_least(1)
    )
    max_num_queued_tokens: int | None = setting(
        None,
        doc="prompt tokens of all requests without output, at which further requests get 503. "
        "Choose the wanted time to the first token times the prompt tokens that the replicas "
        "compute per second (default: no limit)",
        check=at_least(1),
    )
    max_choices_per_request: int = setting(
        256, doc="most answers of one request: its prompts times n", check=at_least(1)
    )
    max_body_bytes: int = setting(
        4 * 2**20,
        doc="most bytes of an HTTP body; a gRPC message may have half as many. A request may have "
        "one value, such as a token id, for each 32 bytes of this limit. Bodies above 64 KiB may "
        "take eight times this limit together; further large bodies wait. At most 64 MiB, the size "
        "of a message to a replica",
        check=between(1024, MAX_MESSAGE_BYTES),
    )
    unknown_fields: str = setting(
        IGNORE,
        doc="unknown fields of a JSON body: ignore, and name them in X-Stepwell-Ignored-Fields "
        "and the log, or refuse with 400",
        check=one_of((IGNORE, REFUSE)),
    )
    max_connections: int = setting(
        4096,
        doc="most open HTTP connections, and most open gRPC connections; at the limit, idle HTTP "
        "connections are closed",
        check=at_least(1),
    )
    receive_timeout_seconds: float = setting(
        10.0,
        doc="time limit for receiving the headers of an HTTP request, a gRPC message, or the start "
        "of a gRPC connection; an HTTP body has three times as long",
        check=at_least(0.01),
    )
    http_keep_alive_seconds: float = setting(
        65.0,
        doc="time for which an HTTP connection stays open without a request",
        check=at_least(0.01),
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        doc="accepted names in Host besides addresses, or * (default: localhost if http_address "
        "is a loopback address, else any)",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        doc="origins of web pages that may read answers, such as https://chat.example, or * "
        "(default: none; CORS)",
    )
    stream_interval: int = setting(
        1,
        doc="tokens per event of a stream, after the first token; with stop strings always 1",
        check=at_least(1),
    )
    sse_keep_alive_interval: float = setting(
        15.0,
        doc="seconds without an event after which a stream sends a comment or ping, and status 200 "
        "before it if the answer has not begun; 0: never",
        check=at_least(0),
    )
    reader_timeout_seconds: float = setting(
        30.0,
        doc="time after which a stream or a connection is ended if its client does not read",
        check=at_least(0.1),
    )

    @property
    def max_items_per_request(self) -> int:
        """Limit on the number of values in a request, such as token ids, and on the number of
        tokens in an answer of /tokenize. Reading one value blocks the event loop for about 100 ns.
        """
        return self.max_body_bytes // 32

    @property
    def max_logprobs_per_request(self) -> int:
        """Limit on the number of log-probabilities in an answer that is not streamed. A
        log-probability takes 8 bytes.
        """
        return 32 * self.max_items_per_request

    @property
    def max_buffered_body_bytes(self) -> int:
        """Limit on the total bytes of buffered HTTP bodies. Only bodies above 64 KiB count."""
        return 8 * self.max_body_bytes

    @property
    def max_message_bytes(self) -> int:
        """Limit on the bytes of a message from a gRPC client. The limit for HTTP bodies is higher,
        because numbers take more bytes in JSON.
        """
        return self.max_body_bytes // 2

    @property
    def body_timeout_seconds(self) -> float:
        """Time limit for receiving the body of an HTTP request."""
        return 3 * self.receive_timeout_seconds
