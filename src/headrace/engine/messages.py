"""What the HTTP process and the engine process say to each other: msgspec messages over a ZeroMQ socket.

A message is MessagePack with the name of its type in it. Dataclasses travel as they are, and are checked again where
they arrive; an error travels as the name of its class, its message and its attributes, so that it means the same on
both sides.
"""

from typing import Any

import msgspec

from headrace import errors
from headrace.config import EngineConfig
from headrace.engine.request import Request, TokenDelta
from headrace.engine.stats import EngineStats, ModelInfo
from headrace.errors import HeadraceError


class Load(msgspec.Struct, tag=True):
    """The first message to the engine."""

    config: EngineConfig


class Submit(msgspec.Struct, tag=True):
    """A request to run. It is answered by its id in `accepted` or `refused` of a Turn."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """The id of a request that nobody waits for any more."""

    request_id: str


class Stop(msgspec.Struct, tag=True):
    """The engine process is to end."""


class Loaded(msgspec.Struct, tag=True):
    """The engine is ready."""

    info: ModelInfo
    stats: EngineStats


class Failed(msgspec.Struct, tag=True):
    """The engine cannot be loaded; its process ends."""

    error: HeadraceError


class Turn(msgspec.Struct, tag=True, omit_defaults=True):
    """What has happened in the engine since the last one: requests taken in or refused, and what a step has brought."""

    stats: EngineStats
    accepted: list[str] = []
    refused: dict[str, HeadraceError] = {}
    deltas: list[TokenDelta] = []


_KINDS = {
    kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HeadraceError)
}


def _plain(value: Any) -> Any:
    if isinstance(value, HeadraceError):
        return [type(value).__name__, str(value), vars(value)]
    raise NotImplementedError(f"{type(value).__name__} cannot be sent")


def _restored(kind: type, value: Any) -> Any:
    if issubclass(kind, HeadraceError):
        name, message, attributes = value
        return _KINDS[name](message, **attributes)
    raise NotImplementedError(f"{kind.__name__} cannot be received")


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
to_engine = msgspec.msgpack.Decoder(Load | Submit | Abort | Stop, dec_hook=_restored).decode
from_engine = msgspec.msgpack.Decoder(Loaded | Failed | Turn, dec_hook=_restored).decode
