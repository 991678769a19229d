"""The routes of OpenAI's API over one engine."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace import __version__
from headrace.config import EngineConfig
from headrace.errors import HeadraceError
from headrace.formats.package_models import DEFAULT_MODEL
from headrace.server.chat import chat_chunks, chat_completion
from headrace.server.completions import completion, completion_chunks
from headrace.server.config import ServerConfig
from headrace.server.errors import ApiError, JsonResponse, as_api_error, error_response
from headrace.server.guard import Guard
from headrace.server.stream import EventStream, run_together
from headrace.server.translate import chat_job, check_model, completion_job

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine


def create_app(engine: "AsyncEngine", config: ServerConfig) -> FastAPI:
    """The application. It starts the engine when it starts, and stops it when it ends."""
    names = model_names(engine.config, config)
    created = int(time.time())

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.add_middleware(Guard, max_body_size=config.max_body_size)

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(as_api_error(error, request.state.request_id))

    for kind in (ApiError, HeadraceError, HTTPException):
        app.add_exception_handler(kind, on_error)

    def model_object(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "headrace",
            "max_model_len": engine.max_model_len,
        }

    def require_engine() -> None:
        if not engine.is_alive:
            raise ApiError(503, "the engine does not run; the server's log tells why")

    @app.get("/health")
    async def health() -> Response:
        require_engine()
        return JsonResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/v1/models")
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [model_object(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name, names)
        return JsonResponse(model_object(name))

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        job = await asyncio.to_thread(chat_job, engine, names, await json_body(request))
        require_engine()  # a stream that has begun cannot say 503 any more
        deltas = run_together(engine, job.requests)
        if job.body.stream:
            return EventStream(chat_chunks(job, engine.tokenizer, deltas), request.state.request_id)
        return JsonResponse(await chat_completion(job, engine.tokenizer, deltas))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        job = await asyncio.to_thread(completion_job, engine, names, await json_body(request))
        require_engine()  # a stream that has begun cannot say 503 any more
        deltas = run_together(engine, job.requests)
        if job.body.stream:
            return EventStream(completion_chunks(job, engine.tokenizer, deltas), request.state.request_id)
        return JsonResponse(await completion(job, engine.tokenizer, deltas))

    return app


async def json_body(request: Request) -> bytes:
    """The body of a request that says it is JSON. (A page in a browser cannot say so without the server's consent.)"""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
        message = "send JSON, uncompressed, with the header 'Content-Type: application/json'"
        raise ApiError(415, message, code="unsupported_media_type")
    return await request.body()


def model_names(engine_config: EngineConfig, config: ServerConfig) -> list[str]:
    """What clients may call the model: what the config says, or else its name on the hub, or that of its file."""
    if config.served_model_name:
        return config.served_model_name
    model = engine_config.model
    if model == "default":
        return [DEFAULT_MODEL.file.removesuffix(".gguf"), model]
    return [Path(model).resolve().name.removesuffix(".gguf") if Path(model).exists() else model]
