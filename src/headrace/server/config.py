"""The server's settings: one dataclass, filled from flags, a YAML file or Python, as EngineConfig is."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from headrace.config import reject_unknown
from headrace.errors import ConfigError


@dataclass(kw_only=True)
class ServerConfig:
    """Where and how to serve.

    host: address to listen on; the default is reached from this machine only, 0.0.0.0 from everywhere.
    port: to listen on; 0 takes a free one.
    served_model_name: under which clients ask for the model, instead of its own; may be given several times, the first
        is the one that `/v1/models` lists first.
    max_body_size: largest request body, in bytes.
    access_log: write a line to stderr for every HTTP request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: list[str] | None = None
    max_body_size: int = 16 * 2**20
    access_log: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address or a name, not {self.host!r}")
        for name, low, high in (("port", 0, 65535), ("max_body_size", 1024, 2**30)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        names = self.served_model_name
        if names is not None and not (
            isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)
        ):
            raise ConfigError(f"served_model_name must be one or more names, not {names!r}")
        if not isinstance(self.access_log, bool):
            raise ConfigError(f"access_log must be true or false, not {self.access_log!r}")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "ServerConfig":
        """A config from keyword settings; an unknown key is an error that names the nearest known one."""
        reject_unknown(settings, (f.name for f in fields(cls)), "server setting")
        return cls(**settings)
