"""The routes that load and unload LoRA adapters while the gateway serves, with vLLM's paths."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from services.common.errors import StepwellError, Unavailable
from services.gateway.adapters.http.exchange.fields import Body
from services.gateway.adapters.http.exchange.parse import BodyReader
from services.gateway.adapters.http.exchange.route import Route
from services.gateway.adapters.lora_files import read_adapter, within
from services.gateway.core.fleet.administration import Administration
from services.gateway.core.lora_modules import LoraModules


class LoadLoraBody(Body):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoraBody(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: str


@dataclass(eq=False)
class LoraRoutes:
    """The routes that load and unload adapters, which must be below the directory `allowed`. If it
    is None, there are no such routes.
    """

    modules: LoraModules
    administration: Administration
    bodies: BodyReader
    allowed: Path | None

    def routes(self) -> Sequence[Route]:
        if self.allowed is None:
            return ()
        return (
            Route(
                "/v1/load_lora_adapter",
                self.load_lora_adapter,
                "text/plain",
                ("POST",),
                tag="adapters",
                body=LoadLoraBody,
                errors=(403, 404),
            ),
            Route(
                "/v1/unload_lora_adapter",
                self.unload_lora_adapter,
                "text/plain",
                ("POST",),
                tag="adapters",
                body=UnloadLoraBody,
                errors=(403, 404),
            ),
        )

    async def load_lora_adapter(self, request: Request) -> Response:
        """Loads an adapter at every replica.

        Afterwards clients may request its name as the model.
        """
        body = await self.bodies.read(request, LoadLoraBody)
        assert self.allowed is not None
        in_place = body.load_inplace
        self.modules.check_new(body.lora_name, in_place=in_place)
        directory = within(self.allowed, body.lora_path)
        adapter = await asyncio.to_thread(read_adapter, body.lora_name, directory)
        outcomes = await self.administration.load_adapter(adapter)
        failures = [outcome.error for outcome in outcomes if outcome.error is not None]
        refusals = [error for error in failures if not isinstance(error, Unavailable)]
        if refusals:
            raise _of_body(refusals[0])
        if len(failures) == len(outcomes):
            raise failures[0]
        self.modules.add(adapter, in_place=in_place)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        """Unloads an adapter. Running requests with this adapter continue."""
        body = await self.bodies.read(request, UnloadLoraBody)
        self.modules.remove(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _of_body(error: StepwellError) -> StepwellError:
    """Returns a replica's refusal with `lora_path`, the name in the body, as its field."""
    error.field = "lora_path"
    return error
