"""`headrace quantize` and `headrace eval` as a user has them."""

import json
from pathlib import Path

import pytest
import torch

from headrace.cli.main import main
from helpers.quantized_files import t0q_config
from helpers.tiny import save_t0, t0_weights

TEXT = str(Path(__file__).parents[2] / "README.md")


@pytest.fixture(scope="module")
def t0q(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = t0q_config()
    return str(save_t0(tmp_path_factory.mktemp("t0q"), config=config, weights=t0_weights(config=config)))


def test_quantize_then_measure(t0q: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    flags = [
        "--dataset",
        TEXT,
        "--samples",
        "8",
        "--seq-len",
        "64",
        "--bits",
        "4",
        "--group-size",
        "32",
        "--threads",
        "1",
    ]
    assert main(["quantize", t0q, "--method", "gptq", "--output", out, "--report", *flags]) == 0
    assert "14 matrices in 4 bits" in capsys.readouterr().out
    report = (tmp_path / "out" / "quantization_report.html").read_text()
    assert report.count("<circle") == 14
    assert "model.layers.1.mlp.down_proj" in report

    measure = ["--dataset", TEXT, "--tokens", "200", "--window", "64", "--threads", "1", "--backend", "reference"]
    assert main(["eval", "ppl", out, "--json", *measure]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 199
    assert main(["eval", "kld", out, "--reference", t0q, "--json", *measure]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["model"]["nll"] == pytest.approx(found["nll"], rel=1e-6)
    assert 0 < compared["kl"] < 1
    assert main(["eval", "kld", out, "--reference", t0q, *measure]) == 0
    text = capsys.readouterr().out
    assert f"{compared['kl']:.5f} nats" in text
    assert "same top token" in text
    assert main(["eval", "ppl", out, *measure]) == 0
    assert capsys.readouterr().out.startswith(f"perplexity        {found['perplexity']:.5g}")


def test_report_as_json(t0q: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", t0q, "--method", "int8", "--output", str(tmp_path / "out"), "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert {entry["bits"] for entry in entries} == {8}
    assert not (tmp_path / "out" / "quantization_report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "MODEL", "--output", "OUT"], "method must be one of int8, int4, gptq, awq, smoothquant"),
        (["quantize", "MODEL", "--output", "OUT", "--method", "gptq"], "needs a dataset"),
        (["quantize", "MODEL", "--output", "OUT", "--method", "int8", "--threads", "0"], "threads must be at least 1"),
        (["quantize", "MODEL", "--output", "OUT", "--method", "gptq", "--dataset", TEXT], "128 samples of 512 take"),
        (["quantize", "nowhere", "--output", "OUT", "--method", "int8"], "nowhere: does not exist"),
        (["eval", "kld", "MODEL", "--dataset", TEXT], "needs a --reference"),
        (["eval", "ppl", "MODEL", "--dataset", TEXT, "--reference", "x"], "ppl has no --reference"),
        (["eval", "ppl", "MODEL", "--dataset", TEXT, "--window", "1"], "window must be at least 2"),
        (["eval", "ppl", "MODEL", "--dataset", TEXT, "--window", "8", "--stride", "9"], "tokens would be left out"),
        (["eval", "ppl", "MODEL", "--dataset", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["eval", "ppl", "MODEL", "--dataset", TEXT, "--window", "4096"], "512"),
    ],
)
def test_errors(t0q: str, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"MODEL": t0q, "OUT": str(tmp_path / "out")}
    assert main([names.get(word, word) for word in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert torch.get_num_threads() >= 1
