"""`headrace generate`, judged by T0's NumPy forward pass."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli.main import main
from helpers.http_server import t0_greedy, t0_text
from helpers.tiny import save_t0, t0_config

PROGRAM = Path(sys.executable).with_name("headrace")
GREEDY = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]


def expected(prompt: str, count: int = 6) -> str:
    return t0_text(t0_greedy([*prompt.encode()], count))


def test_the_installed_program(t0_directory: Path) -> None:
    run = subprocess.run(
        [PROGRAM, "generate", t0_directory, "abc", *GREEDY], capture_output=True, encoding="utf-8", check=True
    )
    assert run.stdout == expected("abc") + "\n"


def test_a_reader_that_has_had_enough(t0_directory: Path) -> None:
    command = [PROGRAM, "generate", t0_directory, "abc", "--max-tokens", "400", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.read(1)
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 1


def test_without_streaming(t0_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(t0_directory), "--no-stream", *GREEDY, "abc"]) == 0
    assert capsys.readouterr().out == expected("abc") + "\n"


def test_several_prompts(t0_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(t0_directory), "abc", "x", *GREEDY]) == 0
    assert capsys.readouterr().out == f"==> abc <==\n{expected('abc')}\n\n==> x <==\n{expected('x')}\n\n"


def test_json_lines(t0_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("é\n\nx\n", encoding="utf-8")
    assert main(["generate", str(t0_directory), "abc", "--prompts-file", str(file), "--json", *GREEDY]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.split("\n")[:-1]]
    for answer, prompt in zip(answers, ["abc", "é", "x"], strict=True):
        ids = [*prompt.encode()]
        assert answer == {
            "prompt": prompt,
            "prompt_token_ids": ids,
            "outputs": [
                {
                    "index": 0,
                    "text": expected(prompt),
                    "token_ids": t0_greedy(ids, 6),
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
        }


def test_standard_input(
    t0_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert main(["generate", str(t0_directory), *GREEDY]) == 0
    assert capsys.readouterr().out == expected("a\nb") + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    assert main(["generate", str(t0_directory), "--prompts-file", "-", "--json", *GREEDY]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == ["a", "b"]


def test_a_stop_string_and_a_seed(t0_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def generate(*flags: str) -> str:
        assert main(["generate", str(t0_directory), "abc", "--max-tokens", "30", *flags]) == 0
        return capsys.readouterr().out

    full = expected("abc", 30)
    stop = full[10:12]
    assert generate("--temperature", "0", "--ignore-eos", "--stop", "never", f"--stop={stop}") == (
        full[: full.index(stop)] + "\n"
    )
    assert generate("--seed", "1") == generate("--seed", "1") != generate("--seed", "2")


def test_the_models_own_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = save_t0(tmp_path / "T0", generation_config={"temperature": 0.0, "do_sample": True})
    assert main(["generate", str(directory), "abc", "--max-tokens", "6", "--ignore-eos"]) == 0
    assert capsys.readouterr().out == expected("abc") + "\n"


def test_what_cannot_be_done(t0_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = save_t0(tmp_path / "strange", config=t0_config(architectures=["MambaForCausalLM"], model_type="mamba"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    t0 = str(t0_directory)
    for arguments, message in [
        ([str(unknown), "x"], "Mamba"),
        ([str(tmp_path), "x"], str(tmp_path)),
        ([str(empty), "x"], str(empty)),
        ([t0, "x", "--top-p", "7"], "top_p must be between 0.0 and 1.0"),
        ([t0, "x", "y", "--stream"], "--stream"),
        ([t0, "x", "--json", "--stream"], "--stream"),
        ([t0, "x" * 600], "512"),
        ([t0, ""], "prompt"),
        ([t0, "--prompts-file", str(empty)], "holds no prompt"),
        ([t0, "--prompts-file", str(tmp_path / "none.txt")], "cannot be read"),
        ([t0, "x", "--max-model-len", "100000"], "512"),
        ([t0, "x", "--kv-cache-memory", "1"], "kv_cache_memory"),
    ]:
        assert main(["generate", *arguments]) == 1, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: "), error
        assert message in error
        assert error.count("\n") == 1
