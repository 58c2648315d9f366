"""The body of the answer of /activity/overview."""

from services.gateway.adapters.http.openapi.answers import Answer


class ListedAlert(Answer):
    """An alert of deploy/prometheus/rules that fires, or that ended in the last hour."""

    name: str
    severity: str
    summary: str
    description: str
    runbook_url: str
    labels: dict[str, str]
    began_unix_seconds: float
    ended_unix_seconds: float | None


class ListedTenant(Answer):
    """A tenant's sequences at this gateway. Counts tokens of requests that ended in the last
    minute, without tokens of cached prompts. `share_of_minute` is the tenant's fraction of the
    tokens of all tenants.
    """

    tenant: str
    num_running: float
    num_waiting: float
    num_tokens_of_minute: float
    share_of_minute: float
    num_refused_of_hour: float


class RefusalReason(Answer):
    """The number of requests that this gateway refused for one reason."""

    reason: str
    num_of_minute: float
    num_of_hour: float


class ProcessCertificate(Answer):
    """A certificate that a process uses, for clients (public) or for other services (internal)."""

    certificate: str
    seconds_left: float


class ListedProcess(Answer):
    """A process of this gateway or of its replicas. `version` and `protocol` are null if the
    process does not report them. `model_name` is null for the gateway. `rank` is a worker's rank.
    """

    service: str
    model_name: str | None
    replica: str
    instance: str
    rank: str | None
    version: str | None
    protocol: str | None
    started_unix_seconds: float
    certificates: list[ProcessCertificate]


class RedisUse(Answer):
    """What Redis is used for, and what happens without Redis. `works` is null if it is not known
    before the next call.
    """

    name: str
    works: bool | None
    without: str


class RedisState(Answer):
    """The time that Redis took to answer, or the error."""

    address: str
    seconds: float | None
    error: str
    uses: list[RedisUse]


class Overview(Answer):
    """An answer of /activity/overview. `redis` is null if Redis is not configured."""

    unix_seconds: float
    watched_since_unix_seconds: float
    gateway: str
    alerts: list[ListedAlert]
    num_rules: int
    rules_left_out: list[str]
    num_series_left_out: int
    tenants: list[ListedTenant]
    refusals: list[RefusalReason]
    processes: list[ListedProcess]
    redis: RedisState | None
