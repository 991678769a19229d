"""The hub, with the real library against a hub on this machine, and without any against a cache laid out by hand."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from headrace.formats import hub
from headrace.formats.hub import HubModel, parse_name
from helpers.fake_hub import COMMIT, TOKEN, FakeHub, serving

MODEL = {
    name: name.encode()  # the cache keeps equal contents once, so they differ
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    )
}
OF_NO_USE = {
    "README.md": b"#",
    "pytorch_model.bin": b"no",
    "original/params.json": b"{}",
    "original/consolidated.00.pth": b"no",
    "onnx/config.json": b"{}",
    "onnx/model.onnx": b"no",
    "consolidated.safetensors": b"no",
    "fp16/model.safetensors": b"no",
    "tf_model.h5": b"no",
    "run.py": b"no",
}
GGUFS = {
    "README.md": b"#",
    "m.Q4_1.gguf": b"GGUF4",
    "m.Q8_0.gguf": b"GGUF8",
    "big/m-00001-of-00002.gguf": b"GGUF1",
    "big/m-00002-of-00002.gguf": b"GGUF2",
}
REPOS = {"org/model": MODEL | OF_NO_USE, "org/ggufs": GGUFS, "org/gated": MODEL, "org/nothing": {"README.md": b"#"}}

SCRIPT = textwrap.dedent("""
    import json, sys
    from headrace.errors import ModelError
    from headrace.formats import hub
    assert "huggingface_hub" not in sys.modules
    for name, revision in json.loads(sys.argv[1]):
        try:
            print(json.dumps(str(hub.download(hub.parse_name(name), revision))))
        except ModelError as error:
            print(json.dumps({"error": str(error)}))
""")


def download(home: Path, *models: str | tuple[str, str], **environment: str) -> list[Any]:
    """What `hub.download` gives in a process of its own, since the library reads its environment when imported."""
    asked = [(model, None) if isinstance(model, str) else model for model in models]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    own = {"HF_HOME": str(home), "PYTHONPATH": str(Path(hub.__file__).parents[2]), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
    run = subprocess.run(command, env=inherited | own | environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def files_under(folder: str) -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubModel("org/name", None)),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", HubModel("HuggingFaceTB/SmolLM2-135M-Instruct", None)),
        ("o_1/n.2-x", HubModel("o_1/n.2-x", None)),
        ("org/name:m.Q4_1.gguf", HubModel("org/name", "m.Q4_1.gguf")),
        ("org/name/m.Q4_1.gguf", HubModel("org/name", "m.Q4_1.gguf")),
        ("org/name/sub/m.gguf", HubModel("org/name", "sub/m.gguf")),
        ("org/name:sub/m.gguf", HubModel("org/name", "sub/m.gguf")),
        ("models/m.gguf", None),
        ("name", None),
        ("org/name/sub", None),
        ("org/name:main", None),
        ("/org/name", None),
        ("./org/name", None),
        ("../name", None),
        ("~/name", None),
        ("org//name", None),
        ("org/name/", None),
        ("org/na me", None),
        ("org/näme", None),
        ("", None),
        ("https://huggingface.co/org/name", None),
    ],
)
def test_names(name: str, expected: HubModel | None) -> None:
    assert parse_name(name) == expected


def test_downloads_what_is_needed_and_then_nothing(tmp_path: Path) -> None:
    with serving(FakeHub(REPOS)) as fake:
        [path] = download(tmp_path, "org/model", HF_ENDPOINT=fake.url)
        assert files_under(path) == set(MODEL)
        assert sorted(fake.asked) == sorted(MODEL)
        assert path.startswith(str(tmp_path))
        again = download(tmp_path, "org/model", ("org/model", "main"), ("org/model", COMMIT), HF_ENDPOINT=fake.url)
        assert again == [path] * 3
        assert sorted(fake.asked) == sorted(MODEL)
    assert download(tmp_path, "org/model", HF_HUB_OFFLINE="1") == [path]


def test_gguf_files(tmp_path: Path) -> None:
    with serving(FakeHub(REPOS)) as fake:
        names = ["org/ggufs:m.Q4_1.gguf", "org/ggufs/m.Q4_1.gguf", "org/ggufs/big/m-00001-of-00002.gguf"]
        one, same, split = download(tmp_path, *names, HF_ENDPOINT=fake.url)
    assert Path(one).read_bytes() == b"GGUF4"
    assert same == one
    assert files_under(str(Path(split).parent)) == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}
    assert "m.Q8_0.gguf" not in fake.asked


def test_faults_have_advice(tmp_path: Path) -> None:
    asked = {
        "org/none": "org/none: is not on the hub, or private: check the name, and set HF_TOKEN for a private model",
        "org/gated": "org/gated: is gated: accept its terms on https://huggingface.co/org/gated, and set HF_TOKEN",
        ("org/model", "v9"): "org/model: has no revision 'v9'",
        "org/ggufs": "org/ggufs: has no config.json; if it holds GGUF files, name one of them: org/ggufs:FILE.gguf",
        "org/nothing": "org/nothing: has no config.json; if it holds GGUF files, name one of them",
        "org/ggufs:x.gguf": "org/ggufs: has no file 'x.gguf'",
        "org/a..b": "org/a..b: is not a valid hub name: ",
    }
    with serving(FakeHub(REPOS, gated=frozenset({"org/gated"}))) as fake:
        answers = download(tmp_path, *asked, HF_ENDPOINT=fake.url)
        for expected, answer in zip(asked.values(), answers, strict=True):
            assert answer["error"].startswith(expected)
            assert "\n" not in answer["error"]
        [path] = download(tmp_path, "org/gated", HF_ENDPOINT=fake.url, HF_TOKEN=TOKEN)
        assert files_under(path) == set(MODEL)


def test_without_a_network(tmp_path: Path) -> None:
    offline, unreachable = "HF_HUB_OFFLINE forbids to download it", "the hub cannot be reached: check the network"
    [answer] = download(tmp_path, "org/model", HF_HUB_OFFLINE="1")
    assert answer["error"].startswith("org/model: is not in the local cache, and ")
    assert offline in answer["error"]
    [answer, file] = download(tmp_path, "org/model", "org/ggufs:m.gguf", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable in answer["error"]
    assert unreachable in file["error"]


def test_a_cache_laid_out_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--model"
    for number, (name, content) in enumerate((MODEL | {"m.gguf": b"GGUF"}).items()):
        blob = folder / "blobs" / f"{number:040}"
        link = folder / "snapshots" / COMMIT / name
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    snapshot = str(folder / "snapshots" / COMMIT)
    asked = ["org/model", ("org/model", COMMIT), "org/model:m.gguf", ("org/model", "v2"), "org/model:other.gguf"]
    answers = download(tmp_path, *asked, HF_HUB_OFFLINE="1")
    assert answers[:3] == [snapshot, snapshot, f"{snapshot}/m.gguf"]
    assert "is not in the local cache" in answers[3]["error"]
    assert "has no file 'other.gguf'" in answers[4]["error"]
