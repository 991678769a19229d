"""What the routes share: the engine, who may use it, and whether it takes requests now."""

import math
import time
from pathlib import Path

from starlette.types import Scope

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.formats.package_models import DEFAULT_MODEL
from headrace.server.config import ServerConfig
from headrace.server.errors import ApiError
from headrace.server.keys import Key, Keys, load_keys
from headrace.server.metrics import Metrics

# These answer while the model loads and while the server ends; all others say 503 then.
ALWAYS = ("/health", "/ready", "/version", "/metrics", "/docs", "/openapi.json")
LOADING_RETRY = 2  # seconds


class Service:
    """One engine as it is served.

    names: what clients may call the model; the first is the one for metrics and greetings.
    created: when it began, in Unix time. drains_until: once the server has been told to end, the moment by
    `time.monotonic` at which it does.
    """

    def __init__(self, engine_config: EngineConfig, config: ServerConfig) -> None:
        self.config = config
        self.names = model_names(engine_config, config)
        self.keys: Keys = load_keys(config)
        self.metrics = Metrics(self.names[0], config.metrics_compat)
        self.engine = AsyncEngine(engine_config, log_format=config.log_format, on_delta=self.metrics.delta)
        self.metrics.watch(self.engine)
        self.created = int(time.time())
        self.drains_until: float | None = None

    def admit(self, scope: Scope) -> Key | None:
        """The API key of a request that may go on. Raises ApiError for one that may not, or not now."""
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        key = self.keys.admit(scope, path)
        if path not in ALWAYS:
            self.require_ready()
        return key

    def require_ready(self) -> None:
        """Raises ApiError 503 while the model loads, while the server ends, and when the engine is dead."""
        self.require_alive()
        if self.drains_until is not None:
            wait = max(1, math.ceil(self.drains_until - time.monotonic()))
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": str(wait)})

    def require_alive(self) -> None:
        """Raises ApiError 503 while the model loads, and when the engine is dead."""
        if self.engine.death is not None:
            message = f"{self.engine.death}; the server's log tells more"
            raise ApiError(503, message, code="engine_dead", headers={"retry-after": str(LOADING_RETRY)})
        if not self.engine.is_ready:
            headers = {"retry-after": str(LOADING_RETRY)}
            raise ApiError(503, "the model is being loaded", code="loading", headers=headers)


def model_names(engine_config: EngineConfig, config: ServerConfig) -> list[str]:
    """What clients may call the model: what the config says, or else its name on the hub, or that of its file."""
    if config.served_model_name:
        return config.served_model_name
    model = engine_config.model
    if model == "default":
        return [DEFAULT_MODEL.file.removesuffix(".gguf"), model]
    return [Path(model).resolve().name.removesuffix(".gguf") if Path(model).exists() else model]
