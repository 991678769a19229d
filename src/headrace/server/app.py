"""The routes of OpenAI's API over one engine."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from headrace import __version__
from headrace.errors import HeadraceError
from headrace.server.chat import chat_chunks, chat_completion
from headrace.server.completions import completion, completion_chunks
from headrace.server.errors import ApiError, JsonResponse, as_api_error, error_response
from headrace.server.guard import Guard
from headrace.server.metrics import CONTENT_TYPE
from headrace.server.openapi import docs_page, openapi_document
from headrace.server.service import Service
from headrace.server.stream import EventStream
from headrace.server.tokenize import detokenized, tokenized
from headrace.server.translate import chat_job, check_model, completion_job

Route = Callable[[Request], Awaitable[Response]]


def create_app(service: Service) -> FastAPI:
    """The application; its engine is started and stopped by others."""
    app = FastAPI(redirect_slashes=False, openapi_url=None, docs_url=None)
    engine, names, config = service.engine, service.names, service.config

    async def on_error(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error, request.state.request_id)
        service.metrics.error(api_error.reason)
        return error_response(api_error)

    for kind in (ApiError, HeadraceError, HTTPException):
        app.add_exception_handler(kind, on_error)

    def model_object(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "headrace",
            "max_model_len": engine.max_model_len,
        }

    @app.get("/health")
    async def health() -> Response:
        service.require_alive()
        return JsonResponse({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        service.require_ready()
        return JsonResponse({"status": "ready"})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return JsonResponse(openapi_document(config.root_path, has_keys=bool(service.keys.keys)))

    @app.get("/docs")
    async def docs() -> Response:
        return HTMLResponse(docs_page(openapi_document(config.root_path, has_keys=bool(service.keys.keys))))

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model_object(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, names)
        return JsonResponse(model_object(name))

    def generation(make_job: Any, whole: Any, chunks: Callable[..., AsyncGenerator[dict[str, Any], None]]) -> Route:
        """A route that generates. make_job: checks its body. whole, chunks: make the answer, in one or many pieces."""

        async def route(request: Request) -> Response:
            job = await asyncio.to_thread(make_job, engine, names, await json_body(request))
            if request.state.key is not None:
                for each in job.requests:
                    request.state.key.apply(each)
            answer = await engine.submit(job.requests)
            request.state.on_end.callback(answer.close)
            if job.body.stream:
                return EventStream(chunks(job, engine.tokenizer, answer), request.state.request_id, service.metrics)
            return JsonResponse(await whole(job, engine.tokenizer, answer))

        return route

    app.post("/v1/chat/completions")(generation(partial(chat_job, config=config), chat_completion, chat_chunks))
    app.post("/v1/completions")(generation(completion_job, completion, completion_chunks))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return JsonResponse(await asyncio.to_thread(tokenized, engine, names, await json_body(request), config))

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return JsonResponse(await asyncio.to_thread(detokenized, engine, names, await json_body(request)))

    app.add_middleware(Guard, service=service)
    if config.allowed_origins:  # around the guard: a browser asks whether it may come before it sends a key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods or ["*"],
            allow_headers=config.allowed_headers or ["*"],
            allow_credentials=config.allow_credentials,
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


async def json_body(request: Request) -> bytes:
    """The body of a request that says it is JSON. (A page in a browser cannot say so without the server's consent.)"""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        message = "send JSON, uncompressed, with the header 'Content-Type: application/json'"
        raise ApiError(415, message, code="unsupported_media_type")
    return await request.body()
