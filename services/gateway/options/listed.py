"""The list of options. To remove an option, delete its folder and its lines here."""

from dataclasses import dataclass

from services.gateway.options.idempotency import Idempotency, IdempotencySettings
from services.gateway.options.option import Option
from services.gateway.options.sessions import Sessions, SessionSettings
from services.gateway.options.tenants import Tenants, TenantSettings
from services.gateway.options.viewer import Viewer, ViewerSettings
from services.gateway.options.vllm_routes import VllmRoutes


@dataclass(frozen=True, kw_only=True)
class OptionSettings(
    ViewerSettings,
    IdempotencySettings,
    SessionSettings,
    TenantSettings,
):
    """The settings of all options."""


OPTIONS: tuple[type[Option], ...] = (
    Tenants,
    Idempotency,
    Sessions,
    VllmRoutes,
    Viewer,
)
