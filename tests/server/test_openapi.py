"""The server keeps what its own OpenAPI document promises, to a program that sends whatever the document allows."""

from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from headrace.server.openapi import openapi_document
from helpers.http_server import RunningServer

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    unsupported_method,
]  # fmt: skip


@pytest.mark.parametrize("route", sorted(openapi_document("", has_keys=False)["paths"]))
def test_the_document_is_kept(server: RunningServer, route: str) -> None:
    document = server.http.get("/openapi.json").json()
    for body in ("ChatBody", "CompletionBody"):  # so that some requests get through, and do not take long
        properties = document["components"]["schemas"][body]["properties"]
        properties["model"] = {"enum": ["T0"]}
        properties["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
        properties["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 4}
        document["components"]["schemas"][body]["required"].append("max_tokens")
    api = schemathesis.openapi.from_dict(document)
    [(method, operation)] = api[route].items()
    modes = [schemathesis.GenerationMode.POSITIVE]
    if method == "post":  # a body may also be otherwise than the document has it
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:

        @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            case.call_and_validate(base_url=server.url, session=session, checks=CHECKS)

        with requests.Session() as session:  # closes its connections, which the tool's own would leave open
            ask()


def test_every_route_is_in_it(server: RunningServer) -> None:
    """Against the routes that the application has."""
    app = server.server.config.app
    routes = {
        (path.replace(":path", ""), method.lower())
        for route in app.routes  # type: ignore[union-attr]
        for path, methods in [(route.path, route.methods)]
        for method in methods
        if method != "HEAD" and not path.startswith("/docs/")
    }
    document = openapi_document("", has_keys=False)
    assert routes == {(path, method) for path, methods in document["paths"].items() for method in methods}


def test_the_page_needs_nothing_from_elsewhere(server: RunningServer) -> None:
    page = server.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    for word in ("POST /v1/chat/completions", "temperature", "openapi.json", "messages</code> (required)"):
        assert word in page.text
    for word in ("<script", "src=", "http://", "https://"):
        assert word not in page.text
