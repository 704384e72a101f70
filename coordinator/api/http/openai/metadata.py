"""Information about the server: `/v1/models`, `/health`, `/ping`, `/version`, `/metrics`."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from coordinator.api.http.metrics import Workers
from coordinator.api.http.openai.schema.parameters import check_model
from coordinator.api.http.server.encoding import JsonResponse
from coordinator.app import Coordinator
from paceline.core.errors import UnavailableError
from paceline.telemetry.exposition import encoder


class Information:
    """Endpoints that generate no text."""

    def __init__(self, coordinator: Coordinator, registry: CollectorRegistry) -> None:
        self._coordinator = coordinator
        self._registry = registry
        self._workers = Workers(lambda: coordinator.links)
        self._created = int(time.time())

    async def models(self, _request: Request) -> Response:
        """`GET /v1/models`: the served model."""
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{model}`; `/v1/models/` is the list."""
        if not request.path_params["model"]:
            return await self.models(request)
        check_model(request.path_params["model"], self._coordinator.model_name)
        return JsonResponse(self._model())

    def _model(self) -> dict[str, Any]:
        info = self._coordinator.target_info()
        return {
            "id": self._coordinator.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "paceline",
            # The model that the target has loaded: tools load the tokenizer of that name.
            "root": info.model,
            "parent": None,
            "max_model_len": info.max_model_len,
        }

    async def health(self, _request: Request) -> Response:
        """`GET /health` and `/ping`, which some hosts use: 200 while requests are served, else 503."""
        if not self._coordinator.accepting:
            raise UnavailableError(
                "not serving: no target worker is available, or the coordinator is stopping"
            )
        return JsonResponse({"status": "serving"})

    async def version(self, _request: Request) -> Response:
        """`GET /version`."""
        return JsonResponse({"version": version("paceline")})

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: Prometheus text or OpenMetrics, as `accept` asks."""
        await self._workers.refresh()
        encode, content_type = encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})
