"""Small files of a model directory, read with a limit on their size; every fault becomes a ModelError with the path."""

import json
import stat
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ModelError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def file_size(path: Path) -> int:
    """Size in bytes of a regular file that is not empty. Asked before opening, which would block on a named pipe."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {reason(error)}") from None
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{path}: is a directory, not a file")
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{path}: is not a regular file")
    if status.st_size == 0:
        raise ModelError(f"{path}: is empty")
    return status.st_size


def open_file(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {reason(error)}") from None


def reject_lfs_pointer(path: Path, start: bytes, kind: str) -> None:
    """`start`: the first bytes of the file; `kind`: what it should be."""
    if start.startswith(LFS_POINTER):
        raise ModelError(f"{path}: is a Git LFS pointer, not a {kind}: run git lfs pull")


def read_text(path: Path, limit: int, kind: str = "text file") -> str:
    """The content of a UTF-8 file of at most `limit` bytes."""
    if (size := file_size(path)) > limit:
        raise ModelError(f"{path}: is {size} bytes long; more than {limit} is not plausible for a {kind}")
    with open_file(path) as file:
        content = file.read(limit)
    reject_lfs_pointer(path, content, kind)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_json_object(path: Path, limit: int, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes."""
    return parse_json_object(path, read_text(path, limit, "JSON file"), "file", unique_keys=unique_keys)


def parse_json_object(path: Path, text: str, what: str, *, unique_keys: bool = False) -> dict[str, Any]:
    """The JSON object in `text`, which is the part of the file that `what` says.

    unique_keys: refuse an object that names a key twice; otherwise the last one counts, as is usual.
    """
    try:
        content = json.loads(text, object_pairs_hook=_unique_keys if unique_keys else None)
    except RecursionError:
        raise ModelError(f"{path}: the {what} is JSON that is nested too deeply") from None
    except ValueError as error:
        raise ModelError(f"{path}: the {what} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: the {what} must be a JSON object, not a {type(content).__name__}")
    return content


def quoted(name: object) -> str:
    """A name from a file, for a message: whatever it holds, on one line and of bounded length."""
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}..."


def name_list(names: Iterable[str], limit: int = 5) -> str:
    """Some names for a message: the first few of them, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(quoted(name) for name in ordered[:limit]) + more


def reason(error: Exception) -> str:
    """The operating system's words for an OSError, without the path that they would repeat."""
    return getattr(error, "strerror", None) or str(error)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {quoted(twice)} appears twice")
    return content
