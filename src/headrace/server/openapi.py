"""The API as an OpenAPI document, and as a page that needs nothing from elsewhere."""

import html
import json
from typing import Any

from pydantic.json_schema import models_json_schema

from headrace import __version__
from headrace.server.keys import OPEN_ROUTES
from headrace.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, TokenizeChatBody

ERRORS = {
    "400": "The request is wrong; the message says what is, and what would be right.",
    "401": "No API key, or a wrong one.",
    "404": "There is no such model or route.",
    "408": "The request was not complete in time.",
    "413": "The body is too large.",
    "415": "The body is not sent as JSON.",
    "429": "Too much at once; `Retry-After` says when to try again.",
    "503": "The model is being loaded, the server ends, or the request has waited in vain.",
}
BODIES = (ChatBody, CompletionBody, TokenizeBody, TokenizeChatBody, DetokenizeBody)
TEXT = {"type": "string"}
INTEGER = {"type": "integer"}


def _object(**properties: Any) -> dict[str, Any]:
    """An object that has these properties in any case, and perhaps others."""
    return {"type": "object", "properties": properties, "required": list(properties)}


USAGE = _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER)
CHOICES = {"type": "array", "items": _object(index=INTEGER, finish_reason={"type": ["string", "null"]})}
MODEL = _object(id=TEXT, object={"const": "model"}, created=INTEGER, owned_by=TEXT)
ERROR = _object(
    error=_object(message=TEXT, type=TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
)
ANSWER = _object(id=TEXT, object=TEXT, created=INTEGER, model=TEXT, choices=CHOICES, usage=USAGE)
TOKENS = _object(count=INTEGER, max_model_len=INTEGER, tokens={"type": "array", "items": INTEGER})


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _get(summary: str, schema: dict[str, Any], *statuses: str) -> dict[str, Any]:
    return {"get": _operation(summary, _json(schema), statuses)}


def _post(summary: str, *bodies: str, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """bodies: names of the models, of which the body may be any. answer: None for that of a generation."""
    content = _json(ANSWER) | {"text/event-stream": {"schema": TEXT}} if answer is None else _json(answer)
    operation = _operation(summary, content, tuple(ERRORS))
    schemas = [{"$ref": f"#/components/schemas/{body}"} for body in bodies]
    operation["requestBody"] = {"required": True, "content": _json({"anyOf": schemas})}
    return {"post": operation}


def _operation(summary: str, content: dict[str, Any], statuses: tuple[str, ...]) -> dict[str, Any]:
    errors = {status: {"description": ERRORS[status], "content": _json(ERROR)} for status in statuses}
    return {"summary": summary, "responses": {"200": {"description": "It went well.", "content": content}, **errors}}


def openapi_document(root_path: str, *, has_keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. root_path: under which a proxy shows the server. has_keys: whether it asks for API keys."""
    _, schemas = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template="#/components/schemas/{model}"
    )
    definitions = schemas["$defs"]
    for definition in definitions.values():
        if "properties" in definition:
            definition["additionalProperties"] = False
    status = _object(status=TEXT)
    models = _object(object={"const": "list"}, data={"type": "array", "items": MODEL})
    guarded = ("401", "503")
    model = _get("One model.", MODEL, "401", "404", "503")
    model["get"]["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    metrics = _get("Measurements, in Prometheus' text format.", TEXT, "401")
    metrics["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": TEXT}}
    page = _get("This document as a page.", TEXT, "401")
    page["get"]["responses"]["200"]["content"] = {"text/html": {"schema": TEXT}}
    paths = {
        "/v1/chat/completions": _post("The next message of a chat, whole or as server-sent events.", "ChatBody"),
        "/v1/completions": _post("What comes after a prompt, whole or as server-sent events.", "CompletionBody"),
        "/tokenize": _post("What a prompt or a chat is in tokens.", "TokenizeBody", "TokenizeChatBody", answer=TOKENS),
        "/detokenize": _post("The text of tokens.", "DetokenizeBody", answer=_object(prompt=TEXT)),
        "/v1/models": _get("All names of the model.", models, *guarded),
        "/v1/models/{name}": model,
        "/health": _get("Whether the server lives.", status, "503"),
        "/ready": _get("Whether it takes requests.", status, "503"),
        "/version": _get("Headrace's version.", _object(version=TEXT), "401"),
        "/metrics": metrics,
        "/openapi.json": _get("This document.", _object(openapi=TEXT), "401"),
        "/docs": page,
    }  # fmt: skip
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__, "description": "Errors are JSON too, on every route."},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": definitions},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for route in OPEN_ROUTES:
            paths[route]["get"]["security"] = []
    return document


def docs_page(document: dict[str, Any]) -> str:
    """The document for people: each route with its fields, on one page without scripts."""
    parts = []
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{html.escape(operation['summary'])}</p>"
            )
            if "requestBody" in operation:
                for schema in operation["requestBody"]["content"]["application/json"]["schema"]["anyOf"]:
                    parts.append(_table(schemas[schema["$ref"].rpartition("/")[2]]))
    parts.append("<h1>Objects in bodies</h1>")
    parts += [f"<h2>{html.escape(name)}</h2>{_table(schema)}" for name, schema in schemas.items() if "Body" not in name]
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.2em 1em .2em 0;vertical-align:top}"
    title = f"Headrace {html.escape(document['info']['version'])}"
    about = 'OpenAI\'s API. For programs: <a href="openapi.json">openapi.json</a>.'
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    return f"{head}<h1>{title}</h1><p>{about}</p>{''.join(parts)}</html>"


def _table(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    rows = [
        f"<tr><td><code>{html.escape(name)}</code>{' (required)' if name in required else ''}"
        f"<td><code>{html.escape(_kind(field))}</code>"
        for name, field in schema.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _kind(field: dict[str, Any]) -> str:
    """The type of a field in a few words: `string or null`, `integer from 1`."""
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "enum" in field or "const" in field:
        return ", ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array" and field.get("items"):
        kind = f"list of {_kind(field['items'])}"
    low, high = field.get("minimum"), field.get("maximum")
    return kind + (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
