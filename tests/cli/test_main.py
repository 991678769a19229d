"""The program as a whole: help, wrong command lines, exit statuses."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import headrace
from headrace.cli.main import build_parser, main
from headrace.cli.settings import field_docs
from headrace.config import EngineConfig
from headrace.server.config import ServerConfig

PROGRAM = Path(sys.executable).with_name("headrace")


def test_version() -> None:
    run = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["chat", "--help"],
        ["generate", "--help"],
        ["quantize", "--help"],
        ["eval", "--help"],
        ["bench", "--help"],
        ["info", "--help"],
    ],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from headrace.cli.main import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as end: print(end.code, *sys.modules, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    status, *modules = run.stderr.split()
    assert status == "0"
    assert not {"torch", "transformers", "fastapi", "uvicorn", "pydantic", "tokenizers", "numpy", "yaml"} & set(modules)
    assert "usage: headrace" in run.stdout
    assert "examples:" in run.stdout
    assert "exit status:" in run.stdout


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_help_tells_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    settings = [*fields(EngineConfig), *(fields(ServerConfig) if command == "serve" else ())]
    for field in settings:
        flag = "MODEL" if field.name == "model" else "--" + field.name.replace("_", "-")
        assert flag in text
    assert "(default: 64)" in text


@pytest.mark.parametrize("settings", [EngineConfig, ServerConfig])
def test_every_setting_is_documented(settings: type) -> None:
    docs = field_docs(settings)
    assert list(docs) == [field.name for field in fields(settings)]
    assert all(len(text) > 10 for text in docs.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], "invalid choice: 'serv'"),
        (["serve", "--prot", "1"], "unknown argument --prot: did you mean --port?"),
        (["serve", "--max_model_len=1"], "unknown argument --max_model_len: did you mean --max-model-len?"),
        (["serve", "--port", "many"], "invalid int value: 'many'"),
        (["serve", "a", "b"], "unknown argument b"),
        (["serve", "--max-num", "5"], "unknown argument --max-num"),
        (["generate"], "MODEL"),
    ],
)
def test_wrong_command_lines(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert words in output.err
    assert "usage: headrace " in output.err
    assert "COMMAND [arguments] " not in output.err


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_prompts_may_stand_anywhere() -> None:
    args = build_parser().parse_args(["generate", "M", "one", "--top-k", "-1", "two", "--json", "three", "--", "-four"])
    assert args.prompts == ["one", "two", "three", "-four"]
    assert (args.model, args.top_k, args.json) == ("M", -1, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/no/such/model", "x"], "/no/such/model"),
        (["chat", "/no/such/model"], "/no/such/model"),
        (["generate", "M", "x", "--tensor-parallel-size", "2"], "tensor_parallel_size=2 is not supported yet"),
        (["generate", "M", "x", "--dtype", "int3"], "dtype must be one of"),
        (["serve", "M", "--port", "70000"], "port must be an integer from 0 to 65535"),
        (["serve", "M", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["serve", "M", "--host", "192.0.2.1"], "no address of this machine"),
        (["serve", "--config", "/no/such/file.yaml"], "/no/such/file.yaml does not exist"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: ")
    assert message in output.err
