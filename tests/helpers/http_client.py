"""What a client may do that libraries do not let it: raw bytes over a socket of its own."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit


def connect(url: str) -> socket.socket:
    """A connection to the server at this URL, on which nothing may take longer than 30 seconds."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)


def request_bytes(path: str, body: dict[str, Any] | bytes | None = None, **headers: str) -> bytes:
    """A whole request. Underscores in the names of headers are dashes."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: test\r\n"
    for name, value in ({"content_type": "application/json", "content_length": str(len(data))} | headers).items():
        head += f"{name.replace('_', '-')}: {value}\r\n"
    return head.encode() + b"\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes, which it may do by force."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def status_and_error(answer: bytes) -> tuple[int, dict[str, Any]]:
    """The status and the `error` of a raw response."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower(), answer
    return int(head.split()[1]), json.loads(body)["error"]
