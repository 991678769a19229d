"""API keys: who may use the server, for which tenant, how often and how urgently."""

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from starlette.types import Scope

from headrace.config import reject_unknown
from headrace.engine.request import Request
from headrace.errors import ConfigError
from headrace.server.config import ServerConfig
from headrace.server.errors import ApiError

ENVIRONMENT = "HEADRACE_API_KEY"
OPEN_ROUTES = ("/health", "/ready")


@dataclass
class Key:
    """What a client may do that sends this key.

    digest: of the key, which itself is kept nowhere.
    tenant: to whose share its requests count, in place of the `user` that they name.
    requests_per_minute: on average; as many may come at once. None for any number.
    priority: the class of its requests; the `priority` that one names makes it less urgent than that, never more.
    """

    digest: bytes = field(repr=False)
    tenant: str | None = None
    requests_per_minute: float | None = None
    priority: int | None = None
    tokens: float = field(default=0.0, repr=False)
    updated: float = field(default=-math.inf, repr=False)

    def take(self, now: float) -> None:
        """Counts one request, at a moment in seconds. Raises ApiError 429 if there have been too many.

        A token bucket: it holds a minute's worth of requests, and is refilled as time goes by.
        """
        limit = self.requests_per_minute
        if limit is None:
            return
        capacity = max(1.0, limit)
        self.tokens = min(capacity, self.tokens + (now - self.updated) * limit / 60)
        self.updated = now
        if self.tokens < 1:
            wait = max(1, math.ceil((1 - self.tokens) * 60 / limit))
            message = f"this API key may send {limit:g} requests per minute; try again in {wait} s"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait)})
        self.tokens -= 1

    def apply(self, request: Request) -> None:
        """Makes a request count to the key's tenant, and puts it in the key's class or behind."""
        if self.tenant is not None:
            request.tenant = self.tenant
        if self.priority is not None:
            request.priority = self.priority + max(0, request.priority)


class Keys:
    """All keys of a server. Without any, everybody may use it."""

    def __init__(self, keys: list[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self.keys, self.clock = keys, clock

    def admit(self, scope: Scope, path: str) -> Key | None:
        """The key that a request brings. Raises ApiError 401 without a right one, 429 where its limit is reached."""
        if not self.keys or path in OPEN_ROUTES:
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest = hash_of(token.strip()) if kind.lower() == b"bearer" else b""
        found = None
        for key in self.keys:  # all of them, so that the time does not tell where it stands
            if hmac.compare_digest(key.digest, digest):
                found = key
        if found is None:
            message = "this server needs an API key: send it as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        found.take(self.clock())
        return found


def hash_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def load_keys(config: ServerConfig) -> Keys:
    """The keys from the flags, the file and the environment together. Raises ConfigError."""
    plain = [*(config.api_key or []), *filter(None, os.environ.get(ENVIRONMENT, "").split(","))]
    keys = [_key({"key": key}, "api_key") for key in plain]
    if config.api_key_file is not None:
        keys += _from_file(Path(config.api_key_file))
    digests = [key.digest for key in keys]
    if len(set(digests)) < len(digests):
        raise ConfigError("an API key is given twice")
    return Keys(keys)


def _from_file(path: Path) -> list[Key]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"api_key_file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # whose message may quote a key
        raise ConfigError(f"api_key_file {path} is not valid YAML") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"api_key_file {path} must be a list with one entry per key, as '- key: SECRET'")
    return [_key(entry, f"{path}, entry {number}") for number, entry in enumerate(content, 1)]


def _key(entry: Any, place: str) -> Key:
    entry = {"key": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict):
        raise ConfigError(f"{place}: must be a key, or 'key: SECRET' with settings")
    try:
        reject_unknown(map(str, entry), ("key", "tenant", "requests_per_minute", "priority"), "setting")
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    text, tenant, priority = entry.get("key"), entry.get("tenant"), entry.get("priority")
    if not isinstance(text, str) or not text.isascii() or not text.isprintable() or not text or " " in text:
        raise ConfigError(f"{place}: a key is a text of ASCII characters without spaces")
    if tenant is not None and (not isinstance(tenant, str) or not tenant):
        raise ConfigError(f"{place}: tenant must be a name")
    limit = entry.get("requests_per_minute")
    if limit is not None and (not isinstance(limit, int | float) or isinstance(limit, bool) or not 0 < limit < 1e9):
        raise ConfigError(f"{place}: requests_per_minute must be a number above 0, not {limit!r}")
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise ConfigError(f"{place}: priority must be an integer, not {priority!r}")
    return Key(hash_of(text.encode()), tenant, limit, priority)
