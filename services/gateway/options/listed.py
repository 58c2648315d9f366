"""The list of options. To remove an option, delete its folder and its lines here."""

from dataclasses import dataclass

from services.gateway.options import idempotency
from services.gateway.options.option import Option


@dataclass(frozen=True, kw_only=True)
class OptionSettings(
    idempotency.Settings,
):
    """The settings of all options."""


OPTIONS: tuple[type[Option], ...] = (
    idempotency.Idempotency,
)  # fmt: skip
