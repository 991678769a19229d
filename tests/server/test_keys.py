"""API keys: what they guard, what they say of their bearer, and where they come from."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Scope

from headrace.engine.request import Request
from headrace.errors import ConfigError
from headrace.sampling.params import SamplingParams
from headrace.server.config import ServerConfig
from headrace.server.errors import ApiError
from headrace.server.keys import Key, Keys, hash_of, load_keys
from helpers.http_server import RunningServer, running_server

KEY, OTHER, LIMITED = "sk-0123456789", "sk-other", "sk-limited"
ORIGIN = "https://pages.example"
COMPLETION = {"model": "T0", "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(t0_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with keys, behind a proxy that shows it under /llm, for pages of one origin."""
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    file.write_text(
        f"- {OTHER}\n- key: {LIMITED}\n  tenant: team-a\n  requests_per_minute: 2\n  priority: 5\n", encoding="utf-8"
    )
    settings = {
        "api_key": [KEY],
        "api_key_file": str(file),
        "root_path": "/llm",
        "allowed_origins": [ORIGIN],
        "access_log": True,
    }
    with running_server(t0_directory, settings) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def routes(server: RunningServer) -> list[tuple[str, str]]:
    document = server.http.get("/openapi.json", headers=bearer(KEY)).json()
    return [(m.upper(), path.replace("{name}", "T0")) for path, methods in document["paths"].items() for m in methods]


OTHERS = [
    "/", "/v1", "/v1/embeddings", "/tokenize", "/detokenize", "/invocations", "/generate", "/load", "/redoc",
    "//v1/models", "/v1/./models", "/x/../v1/models", "/V1/models", "/v1/models/", "/v1%2Fmodels", "/health/",
    "/Health", "//health", "/ready/../v1/models", "/health%2f..%2fv1/models", "/llm/v1/models",
]  # fmt: skip


def test_everything_but_health_needs_a_key(guarded: RunningServer) -> None:
    all_routes = {*routes(guarded), *(("GET", path) for path in OTHERS), *(("POST", path) for path in OTHERS)}
    all_routes |= {("POST", path) for _, path in all_routes} | {("OPTIONS", "/v1/models"), ("HEAD", "/metrics")}
    assert len(all_routes) > 50
    for method, path in sorted(all_routes):
        # httpx would tidy such paths up.
        request = httpx.Request(method, guarded.url, extensions={"target": path.encode()}, json=COMPLETION)
        response = guarded.http.send(request)
        if path in ("/health", "/ready"):
            assert response.status_code == (200 if method == "GET" else 405), (method, path)
            continue
        assert response.status_code == 401, (method, path)
        assert response.headers["www-authenticate"] == "Bearer"
        if method != "HEAD":
            assert response.json()["error"]["code"] == "invalid_api_key"
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-key": "x"}
    assert guarded.http.get("/v1/models", headers=upgrade).status_code == 401


@pytest.mark.parametrize(
    "value",
    ["Bearer", f"Bearer {KEY}{KEY}", f"Bearer {KEY[:-1]}", f"Basic {KEY}", KEY, f"Bearer,{KEY}", "Bearer é"],
)
def test_other_headers_are_no_keys(guarded: RunningServer, value: str) -> None:
    response = guarded.http.get("/v1/models", headers={"authorization": value.encode()})
    assert response.status_code == 401
    assert KEY not in response.text


def test_two_headers_are_one_too_many(guarded: RunningServer) -> None:
    twice = [("authorization", f"Bearer {KEY}")] * 2
    assert guarded.http.get("/v1/models", headers=twice).status_code == 401


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}", f"Bearer {OTHER}"])
def test_a_key_opens_all_routes(guarded: RunningServer, value: str) -> None:
    headers = {"authorization": value}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 200
    assert guarded.http.post("/v1/completions", json=COMPLETION, headers=headers).status_code == 200
    assert guarded.http.get("/v1/nope", headers=headers).status_code == 404


def test_keys_are_shown_nowhere(guarded: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "headrace"):
        for path in ("/metrics", "/docs", "/openapi.json", "/v1/models"):
            for key in (KEY, f"{KEY}x"):
                response = guarded.http.get(path, headers=bearer(key))
                assert KEY not in response.text + str(response.headers)
        deadline = time.monotonic() + 10
        while len([r for r in caplog.records if r.name.endswith("guard")]) < 8:  # a line in the access log for each
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert KEY not in caplog.text
    assert KEY not in repr(guarded.server.settings) + repr(guarded.server.service.keys.keys)


def test_a_limited_key(guarded: RunningServer) -> None:
    key = next(k for k in guarded.server.service.keys.keys if k.requests_per_minute)
    answers = [guarded.http.get("/v1/models", headers=bearer(LIMITED)) for _ in range(3)]
    assert [a.status_code for a in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests per minute" in answers[2].json()["error"]["message"]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert guarded.http.get("/v1/models", headers=bearer(KEY)).status_code == 200, "others go on"
    assert (key.tenant, key.priority) == ("team-a", 5)


def test_what_a_key_makes_of_a_request(guarded: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Request] = []
    submit = guarded.engine.submit

    async def watch(requests: list[Request]) -> Any:
        seen.extend(requests)
        return await submit(requests)

    monkeypatch.setattr(guarded.engine, "submit", watch)
    key = next(k for k in guarded.server.service.keys.keys if k.requests_per_minute)
    monkeypatch.setattr(key, "requests_per_minute", None)
    for more in ({"user": "me"}, {"user": "me", "priority": -9}, {"priority": 2}):
        assert guarded.http.post("/v1/completions", json=COMPLETION | more, headers=bearer(LIMITED)).status_code == 200
    guarded.http.post("/v1/completions", json=COMPLETION | {"user": "me", "priority": -9}, headers=bearer(KEY))
    assert [(r.tenant, r.priority) for r in seen] == [("team-a", 5), ("team-a", 5), ("team-a", 7), ("me", -9)]


def test_pages_of_other_origins(guarded: RunningServer) -> None:
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    response = guarded.http.options("/v1/completions", headers=ask | {"origin": ORIGIN})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in response.headers["access-control-allow-headers"].lower()
    refused = guarded.http.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    for key, status in ((KEY, 200), ("wrong", 401)):
        answer = guarded.http.get("/v1/models", headers=bearer(key) | {"origin": ORIGIN})
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_behind_a_proxy(guarded: RunningServer) -> None:
    document = guarded.http.get("/openapi.json", headers=bearer(KEY)).json()
    assert document["servers"] == [{"url": "/llm"}]
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    assert document["paths"]["/health"]["get"]["security"] == []


def test_a_minute_s_worth_of_requests() -> None:
    """Against a count by hand: 6 at once, then one every 10 seconds."""
    moment = 100.0
    keys = Keys([Key(hash_of(b"k"), requests_per_minute=6)], clock=lambda: moment)
    scope: Scope = {"headers": [(b"authorization", b"Bearer k")]}

    refusals: list[ApiError] = []

    def passes() -> bool:
        try:
            return keys.admit(scope, "/v1/models") is not None
        except ApiError as error:
            refusals.append(error)
            return False

    assert [passes() for _ in range(8)] == [True] * 6 + [False] * 2
    moment += 10
    assert [passes() for _ in range(2)] == [True, False]
    moment += 35
    assert [passes() for _ in range(4)] == [True, True, True, False]
    assert [(e.status, e.headers["retry-after"]) for e in refusals] == [(429, "10")] * 3 + [(429, "5")]
    moment += 1e6
    assert [passes() for _ in range(8)].count(True) == 6, "what was not used is not saved up"


def test_less_than_one_a_minute() -> None:
    key = Key(hash_of(b"k"), requests_per_minute=0.5)
    key.take(0)
    with pytest.raises(ApiError, match=r"0\.5 requests per minute; try again in 120 s"):
        key.take(0)
    key.take(120)


def test_keys_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "one,two")
    file = tmp_path / "keys.yaml"
    file.write_text("- three\n- {key: four, priority: -1}\n")
    keys = load_keys(ServerConfig(api_key=["five"], api_key_file=str(file))).keys
    assert [k.digest for k in keys] == [hash_of(k) for k in (b"five", b"one", b"two", b"three", b"four")]
    request = Request("x", [1], SamplingParams(), priority=3, tenant="t")
    keys[4].apply(request)
    assert (request.priority, request.tenant) == (2, "t")
    monkeypatch.delenv("HEADRACE_API_KEY")
    assert load_keys(ServerConfig()).keys == []


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "must be a list"),
        ("key: secret", "must be a list"),
        ("- [secret]", "entry 1: must be a key"),
        ("- fine\n- {tenant: a}", "entry 2: a key is a text"),
        ("- {key: 12345}", "a key is a text"),
        ("- 'two words'", "a key is a text"),
        ("- 'sécret'", "a key is a text"),
        ("- {key: secret, tennant: a}", "did you mean 'tenant'"),
        ("- {key: secret, tenant: 5}", "tenant must be"),
        ("- {key: secret, requests_per_minute: 0}", "requests_per_minute must be"),
        ("- {key: secret, requests_per_minute: .nan}", "requests_per_minute must be"),
        ("- {key: secret, priority: high}", "priority must be"),
        ("- secret\n- secret", "given twice"),
        ("- {key: secret", "not valid YAML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, content: str, fault: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=fault) as error:
        load_keys(ServerConfig(api_key_file=str(file)))
    assert "secret" not in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_keys(ServerConfig(api_key_file=str(tmp_path)))
