"""A model hub on this machine: as much of its HTTP interface as downloading needs."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"


@dataclass
class FakeHub:
    """repos: the files of each by path. Requests for `gated` ones need TOKEN; `asked` collects what was downloaded."""

    repos: dict[str, dict[str, bytes]]
    gated: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)
    url: str = ""


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def fail(self, status: int, code: str) -> None:
            self.answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            in_api = parts[:2] == ["api", "models"]
            repo, action, rest = (
                "/".join(parts[2:4] if in_api else parts[:2]),
                *_action(parts[4:] if in_api else parts[2:]),
            )
            files = hub.repos.get(repo)
            if files is None:
                return self.fail(401, "RepoNotFound")
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.fail(403, "GatedRepo")
            if rest[:1] not in (["main"], [COMMIT], []):
                return self.fail(404, "RevisionNotFound")
            if action == "tree":
                tree = [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                return self.answer(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            if action == "resolve":
                path = "/".join(rest[1:])
                if path not in files:
                    return self.fail(404, "EntryNotFound")
                if self.command == "GET":
                    hub.asked.append(path)
                etag = f'"{hashlib.sha1(files[path]).hexdigest()}"'
                return self.answer(200, files[path], {"ETag": etag, "X-Repo-Commit": COMMIT})
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
            return self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _action(parts: list[str]) -> tuple[str, list[str]]:
    return (parts[0], parts[1:]) if parts else ("", [])
