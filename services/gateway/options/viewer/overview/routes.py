"""The route of the overview: /activity/overview."""

from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from services.gateway.adapters.http.exchange.route import Route
from services.gateway.options.viewer.overview import answers
from services.gateway.options.viewer.overview.fleet_watch import LOOK_SECONDS, FleetWatch
from services.gateway.options.viewer.overview.overview_document import overview_document, redis_uses
from services.gateway.options.viewer.overview.redis_probe import RedisProbe

OVERVIEW = "/activity/overview"


class OverviewRoutes:
    """The handler of the route. If `sees_all` is true, a caller sees all tenants and models,
    and otherwise only itself and its models.
    """

    def __init__(
        self,
        watch: FleetWatch,
        redis: RedisProbe | None,
        uses_of_options: Mapping[str, str],
        *,
        sees_all: bool,
    ) -> None:
        """`uses_of_options` maps what options use Redis for to what happens without Redis."""
        self._watch = watch
        self._redis = redis
        self._uses_of_options = [
            {"name": name, "works": None, "without": without}
            for name, without in uses_of_options.items()
        ]
        self._sees_all = sees_all

    def routes(self) -> Sequence[Route]:
        return (Route(OVERVIEW, self.overview, answers.Overview, is_polled=True),)

    async def overview(self, request: Request) -> Response:
        """Shows alerts, tenants, refusals, processes with versions and certificates, and Redis."""
        await self._watch.look()
        caller = request.state.caller
        document = overview_document(self._watch, None if self._sees_all else caller)
        document["redis"] = None
        if self._redis is not None:
            # Read before the PING, during which another thread may begin to store a new sample.
            uses = [*redis_uses(self._watch.store), *self._uses_of_options]
            document["redis"] = await self._redis.look(LOOK_SECONDS) | {"uses": uses}
        return JSONResponse(document, headers={"Cache-Control": "no-store"})
