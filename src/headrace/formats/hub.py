"""Models on the Hugging Face hub, kept in its own cache; HF_HOME, HF_TOKEN and HF_HUB_OFFLINE work as everywhere."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import ModelError

# What a model directory needs. Folders hold the same weights for other runtimes, and so does Mistral's consolidated.*
WANTED = ["*.json", "*.jinja", "*.safetensors"]
UNWANTED = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]

_NAME = r"[A-Za-z0-9_][\w.-]*"
_HUB_MODEL = re.compile(rf"(?P<repo>{_NAME}/{_NAME})(?:[:/](?P<file>[^:]+\.gguf))?", re.ASCII)


@dataclass(frozen=True)
class HubModel:
    """repo: `org/name`. file: the path of a GGUF file in it; None for a model in Hugging Face's own form."""

    repo: str
    file: str | None


def parse_name(name: str) -> HubModel | None:
    """`org/name`, `org/name:FILE.gguf` or `org/name/FILE.gguf`; None for anything else."""
    match = _HUB_MODEL.fullmatch(name)
    if not match or (match["file"] is None and match["repo"].endswith(".gguf")):
        return None
    return HubModel(match["repo"], match["file"])


def download(model: HubModel, revision: str | None = None) -> Path:
    """The local directory of a model, or its GGUF file; only what the cache lacks is downloaded.

    revision: branch, tag or commit; None is the main branch.
    Raises ModelError that says what to do: for a model that is not there or not open to this user, or without network.
    """
    from huggingface_hub import errors, snapshot_download

    wanted, unwanted = (WANTED, UNWANTED) if model.file is None else ([_all_parts(model.file)], [])
    try:
        folder = snapshot_download(model.repo, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted)
    except errors.GatedRepoError:
        fault = f"is gated: accept its terms on https://huggingface.co/{model.repo}, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        fault = "is not on the hub, or private: check the name, and set HF_TOKEN for a private model"
    except errors.RevisionNotFoundError:
        fault = f"has no revision {revision!r}"
    except errors.LocalEntryNotFoundError:
        fault = _not_cached()
    except errors.HFValidationError as error:
        fault = f"is not a valid hub name: {_first_line(error)}"
    except Exception as error:  # the HTTP library beneath differs between versions, and so do its errors
        fault = f"cannot be downloaded: {_first_line(error)}"
    else:
        path = Path(folder)
        if (path / (model.file or "config.json")).exists():
            return path / (model.file or "")
        fault = f"has no file {model.file!r}"
        if model.file is None:
            fault = f"has no config.json; if it holds GGUF files, name one of them: {model.repo}:FILE.gguf"
    raise ModelError(f"{model.repo}: {fault}")


def _all_parts(file: str) -> str:
    """The pattern of a GGUF file's name, and of the other parts' where it is split into NAME-00001-of-0000N.gguf."""
    parts = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", file)
    return f"{glob.escape(parts[1])}-?????-of-{parts[2]}.gguf" if parts else glob.escape(file)


def _not_cached() -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "is not in the local cache, and HF_HUB_OFFLINE forbids to download it: unset it, or name a local path"
    return "is not in the local cache, and the hub cannot be reached: check the network, or name a local path"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
