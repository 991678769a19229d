"""Safetensors files put together byte by byte, so that they can be wrong in any way."""

import json
from pathlib import Path
from typing import Any


def header_bytes(header: Any) -> bytes:
    return header if isinstance(header, bytes) else json.dumps(header).encode()


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """header: an object to be written as JSON, or bytes. length: what the file says of it, if not the truth."""
    raw = header_bytes(header)
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}
