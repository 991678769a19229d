"""`headrace info` tells what is so."""

import json
import os

import pytest
import torch

from headrace import _native
from headrace.cli.main import main


def test_in_words_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    words = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert words.keys() == {name.replace("_", " ") for name in found}
    assert found["torch"] == torch.__version__
    assert found["instruction_sets_available"] == _native.available_isas()
    assert found["instruction_set"] == _native.isa()
    assert found["threads"] >= 1
    assert 1 <= found["cpus_allowed"] <= len(os.sched_getaffinity(0))
    assert "LlamaForCausalLM" in found["architectures"]
    assert {"Q4_1", "Q4_K", "Q8_0"} <= set(found["gguf_types"])


def test_an_instruction_set_that_cannot_be(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def isa() -> str:
        raise ValueError("HEADRACE_ISA: there is no instruction set 'avx3'")

    monkeypatch.setattr(_native, "isa", isa)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "error: HEADRACE_ISA: there is no instruction set 'avx3'\n"
