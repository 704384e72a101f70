"""The HTTP face as one ASGI application."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator import sampling_defaults
from coordinator.access import Gate
from coordinator.conversations import Conversations
from coordinator.coordinator import Coordinator
from coordinator.http.calls import CallObserver
from coordinator.http.chat import ChatCompletions
from coordinator.http.chat_template import ChatTemplate
from coordinator.http.completions import Completions
from coordinator.http.encoding import JsonResponse
from coordinator.http.errors import HttpError, on_defect, on_known_error, on_routing_error
from coordinator.http.farewell import Farewell
from coordinator.http.guard import Guard
from coordinator.http.information import Information
from coordinator.http.metrics import make_registry
from coordinator.http.openapi import document
from coordinator.http.server import HttpServer
from coordinator.http.text import Text
from coordinator.sampling_defaults import SamplingDefaults
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
    """The application; `registry` is what `/metrics` tells of, `gate` whom it serves: None is everybody.

    `defaults` are the model's own of sampling parameters, None those of SamplingParams.
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
    observing = Middleware(CallObserver, recorder=coordinator.recorder)
    guard = Middleware(Guard, gate or Gate(), demands_certificates=demands_certificates)
    middleware = [observing, Middleware(Farewell, coordinator), guard]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


async def _openapi(_request: Request) -> Response:
    return JsonResponse(document())


def make_server(
    coordinator: Coordinator, config: CoordinatorConfig, template: ChatTemplate | None, max_connections: int
) -> HttpServer:
    """The face on its port. Raises InvalidArgumentError for sampling defaults that cannot be honoured."""
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
