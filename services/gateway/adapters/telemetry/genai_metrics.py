"""The server metrics of OpenTelemetry's GenAI conventions. They count only requests that a replica
has scheduled, so refused requests are omitted.
"""

from opentelemetry.metrics import Meter

from services.common.telemetry import names
from services.gateway.core.request.generation import Usage

_REQUEST_BOUNDS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
"""Bucket bounds recommended by the conventions, in seconds."""
_FIRST_TOKEN_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip


class GenAiMetrics:
    """The histograms of the conventions, with their attributes."""

    def __init__(self, meter: Meter, model_name: str) -> None:
        self._model_name = model_name
        self._request = meter.create_histogram(
            names.GENAI_SERVER_REQUEST_DURATION,
            unit="s",
            description="From a request's arrival to its end.",
            explicit_bucket_boundaries_advisory=_REQUEST_BOUNDS,
        )
        self._first_token = meter.create_histogram(
            names.GENAI_SERVER_TIME_TO_FIRST_TOKEN,
            unit="s",
            description="From a request's arrival to its first token.",
            explicit_bucket_boundaries_advisory=_FIRST_TOKEN_BOUNDS,
        )
        self._token = meter.create_histogram(
            names.GENAI_SERVER_TIME_PER_OUTPUT_TOKEN,
            unit="s",
            description="Time per output token after the first token, for requests without an "
            "error.",
            explicit_bucket_boundaries_advisory=_TOKEN_BOUNDS,
        )

    def completed(
        self,
        operation: str,
        seconds: float,
        first_token_seconds: float | None,
        usage: Usage,
        error_type: str | None,
    ) -> None:
        attributes = {
            names.GENAI_OPERATION_NAME: operation,
            names.GENAI_PROVIDER_NAME: names.GENAI_PROVIDER,
            names.GENAI_REQUEST_MODEL: self._model_name,
            names.GENAI_RESPONSE_MODEL: self._model_name,
        }
        failed = {} if error_type is None else {names.GENAI_ERROR_TYPE: error_type}
        self._request.record(seconds, attributes | failed)
        if first_token_seconds is None:
            return
        self._first_token.record(first_token_seconds, attributes)
        if error_type is None and usage.num_generated_tokens > 1:
            since_first = seconds - first_token_seconds
            self._token.record(since_first / (usage.num_generated_tokens - 1), attributes)
