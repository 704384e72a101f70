"""The HTTP API as one ASGI application."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.api import sampling_defaults
from coordinator.api.chat_template import ChatTemplate
from coordinator.api.conversations import Conversations
from coordinator.api.http.metrics import make_registry
from coordinator.api.http.openai.chat import ChatCompletions
from coordinator.api.http.openai.completions import Completions
from coordinator.api.http.openai.metadata import Information
from coordinator.api.http.openai.schema.document import document
from coordinator.api.http.openai.tokenize import Text
from coordinator.api.http.server.calls import HttpCallObserver
from coordinator.api.http.server.encoding import JsonResponse
from coordinator.api.http.server.errors import HttpError, on_defect, on_known_error, on_routing_error
from coordinator.api.http.server.guard import Guard
from coordinator.api.http.server.server import HttpServer
from coordinator.api.http.shutdown import Farewell
from coordinator.api.sampling_defaults import SamplingDefaults
from coordinator.app import Coordinator
from coordinator.auth import Gate
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import PacelineError


def make_app(
    coordinator: Coordinator,
    template: ChatTemplate | None,
    registry: CollectorRegistry | None = None,
    gate: Gate | None = None,
    *,
    demands_certificates: bool = False,
    defaults: SamplingDefaults | None = None,
) -> Starlette:
    """The application. `registry` is the source of `/metrics`; without `gate` every caller is admitted.

    `defaults` are the model's sampling parameters; None uses those of SamplingParams.
    """
    defaults = defaults or SamplingDefaults()
    conversations = Conversations(coordinator, template)
    text = Text(coordinator, conversations)
    information = Information(coordinator, registry or make_registry(coordinator))
    chats = ChatCompletions(coordinator, conversations, defaults)
    routes = [
        Route("/v1/completions", Completions(coordinator, defaults).create, methods=["POST"]),
        Route("/v1/chat/completions", chats.create, methods=["POST"]),
        Route("/v1/models", information.models),
        Route("/v1/models/{model:path}", information.model),
        Route("/tokenize", text.tokenize, methods=["POST"]),
        Route("/detokenize", text.detokenize, methods=["POST"]),
        Route("/health", information.health),
        Route("/ping", information.health, methods=["GET", "POST"]),
        Route("/version", information.version),
        Route("/metrics", information.metrics),
        Route("/openapi.json", _openapi),
    ]
    handlers = {
        PacelineError: on_known_error,
        HttpError: on_known_error,
        HTTPException: on_routing_error,
        Exception: on_defect,
    }
    observing = Middleware(HttpCallObserver, metrics=coordinator.metrics)
    guard = Middleware(Guard, gate or Gate(), demands_certificates=demands_certificates)
    middleware = [observing, Middleware(Farewell, coordinator), guard]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


async def _openapi(_request: Request) -> Response:
    return JsonResponse(document())


def make_server(
    coordinator: Coordinator, config: CoordinatorConfig, template: ChatTemplate | None, max_connections: int
) -> HttpServer:
    """The HTTP API on its port. Raises InvalidArgumentError for sampling defaults that cannot be used."""
    defaults = sampling_defaults.load(config)
    demands = config.tls is not None and bool(config.tls.ca)
    app = make_app(
        coordinator, template, gate=coordinator.gate, demands_certificates=demands, defaults=defaults
    )
    return HttpServer(
        app,
        config.host,
        config.http_port,
        config.tls,
        unread_timeout=config.unread_timeout,
        max_connections=max_connections,
    )
