"""The server's settings: one dataclass, filled from flags, a YAML file or Python, as EngineConfig is."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from headrace.config import reject_unknown
from headrace.errors import ConfigError
from headrace.logs import FORMATS

METRICS_COMPAT = ("none", "vllm")
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "generic")
REASONING_PARSERS = ("auto", "none", "think", "mistral")


@dataclass(kw_only=True)
class ServerConfig:
    """Where and how to serve. The names are vLLM's where the meaning is the same.

    host: address to listen on; the default is reached from this machine only, 0.0.0.0 from everywhere.
    port: to listen on; 0 takes a free one.
    uds: path of a Unix socket to listen on, instead of host and port.
    ssl_certfile, ssl_keyfile: PEM files; with them the server speaks HTTPS.
    root_path: the prefix under which a proxy shows the server, and which it strips.
    served_model_name: under which clients ask for the model, instead of its own; may be given several times, the first
        is the one that `/v1/models` lists first.
    api_key: clients must send it, on every route but `/health` and `/ready`; may be given several times. Other users of
        this machine can see flags: rather use `api_key_file`, or HEADRACE_API_KEY in the environment.
    api_key_file: YAML file with keys, which may name a tenant, a rate limit and a priority each.
    allowed_origins: of web pages that may use the API from a browser, or * for all; none by default. May be given
        several times, as the next two.
    allowed_methods: HTTP methods that these pages may use; all of them by default.
    allowed_headers: HTTP headers that these pages may send; all of them by default.
    allow_credentials: let these pages send cookies and the like.
    max_body_size: largest request body, in bytes.
    max_header_size: largest head of a request, in bytes: its first line and its headers.
    max_connections: open connections; more are refused with a 503.
    client_timeout: seconds within which a client must have sent its request, and in which it must take some of an
        answer; then its connection is closed.
    shutdown_timeout: seconds that running requests have to finish after SIGTERM or Ctrl-C; a second signal ends them.
    metrics_compat: "vllm" gives the metrics the names that vLLM has for them, for existing dashboards.
    log_format: "text", or "json" for one object per line.
    chat_template: path of a Jinja file, to be used instead of the model's own chat template.
    tool_call_parser: in which form the model calls functions; auto tells it by the chat template.
    reasoning_parser: between which marks the model thinks; auto tells them by the chat template.
    access_log: write a line to stderr for every HTTP request.
    enable_log_requests: write the bodies of requests to the log. Without it, nothing of what they say gets there.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    root_path: str = ""
    served_model_name: list[str] | None = None
    api_key: list[str] | None = field(default=None, repr=False)
    api_key_file: str | None = None
    allowed_origins: list[str] | None = None
    allowed_methods: list[str] | None = None
    allowed_headers: list[str] | None = None
    allow_credentials: bool = False
    max_body_size: int = 16 * 2**20
    max_header_size: int = 32 * 2**10
    max_connections: int = 4096
    client_timeout: float = 30.0
    shutdown_timeout: float = 30.0
    metrics_compat: str = "none"
    log_format: str = "text"
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    access_log: bool = False
    enable_log_requests: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address or a name, not {self.host!r}")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_size", 1024, 2**30),
            ("max_header_size", 1024, 2**20),
            ("max_connections", 1, 2**20),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        for name in ("client_timeout", "shutdown_timeout"):
            value = getattr(self, name)
            least = 0.1 if name == "client_timeout" else 0
            if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
                raise ConfigError(f"{name} must be a number of seconds from {least} on, not {value!r}")
        for name in ("served_model_name", "api_key", "allowed_origins", "allowed_methods", "allowed_headers"):
            values = getattr(self, name)
            if values is not None and not (
                isinstance(values, list) and values and all(isinstance(v, str) and v for v in values)
            ):
                shown = "" if name == "api_key" else f", not {values!r}"
                raise ConfigError(f"{name} must be one or more texts{shown}")
        for name in ("uds", "ssl_certfile", "ssl_keyfile", "api_key_file", "chat_template"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name} must be the path of a file, not {value!r}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile go together: give both, or none for plain HTTP")
        if not isinstance(self.root_path, str) or (self.root_path and not self.root_path.startswith("/")):
            raise ConfigError(f"root_path must begin with a slash, as in /llm, not {self.root_path!r}")
        self.root_path = self.root_path.rstrip("/")
        choices_of = {
            "log_format": FORMATS,
            "metrics_compat": METRICS_COMPAT,
            "tool_call_parser": TOOL_CALL_PARSERS,
            "reasoning_parser": REASONING_PARSERS,
        }
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("access_log", "enable_log_requests", "allow_credentials"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if (self.allowed_methods or self.allowed_headers or self.allow_credentials) and not self.allowed_origins:
            raise ConfigError("the settings of CORS have no effect without allowed_origins: name the pages' origins")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "ServerConfig":
        """A config from keyword settings; an unknown key is an error that names the nearest known one."""
        reject_unknown(settings, (f.name for f in fields(cls)), "server setting")
        return cls(**settings)
