"""GGUF files written: codes bit for bit those of the `gguf` package, whole files read by it and by us."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import quantize

from headrace.cli.main import main
from headrace.errors import HeadraceError, ModelError
from headrace.formats.gguf_writer import FILE_TYPES, TYPES, encode
from headrace.formats.open import open_checkpoint
from headrace.quantize.gguf import quantize_gguf
from helpers.model_files import smollm2
from helpers.tiny import save_t0_gguf, t0_weights

KINDS = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


def awkward_rows() -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = rng.standard_t(3, (400, 64)).astype(np.float32)
    rows[0] = 0
    rows[1, 5] = 1e4
    rows[2] *= 1e-6
    rows[3] = 1.5
    rows[4] = -2.25
    rows[5] = np.arange(64) / 2 - 16  # halves
    rows[6, ::2] = rows[6, 1::2]
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_those_of_the_package(kind: str) -> None:
    rows, block_type = awkward_rows(), TYPES[kind]
    expected = quantize(rows, GGMLQuantizationType[kind])
    found = encode(rows.reshape(-1, block_type.block_size), block_type)
    np.testing.assert_array_equal(found.ravel(), expected.view(np.uint8).ravel())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files(tmp_path: Path, kind: str) -> None:
    source = open_checkpoint(str(save_t0_gguf(tmp_path / "t0.gguf")))
    path, counts = quantize_gguf(source, tmp_path / "out", kind)
    assert path.name == f"t0-{kind}.gguf"
    before, after = GGUFReader(tmp_path / "t0.gguf"), GGUFReader(path)
    assert [t.name for t in after.tensors] == [t.name for t in before.tensors]
    for old, new in zip(before.tensors, after.tensors, strict=True):
        matrix = len(old.shape) == 2
        outer = old.name in ("token_embd.weight", "output.weight")
        wanted = "F32" if not matrix else "Q8_0" if outer and kind.startswith("Q4") else kind
        assert new.tensor_type.name == wanted
        assert new.shape.tolist() == old.shape.tolist()
        if matrix:
            expected = quantize(old.data, GGMLQuantizationType[wanted])
            np.testing.assert_array_equal(new.data.view(np.uint8).ravel(), expected.view(np.uint8).ravel())
        else:
            np.testing.assert_array_equal(new.data, old.data)
    changed = {"general.file_type", "general.quantization_version"}
    for key, field in before.fields.items():
        if not key.startswith("GGUF.") and key not in changed:
            assert after.fields[key].contents() == field.contents(), key
    assert after.fields["general.file_type"].contents() == FILE_TYPES[kind]
    assert sum(counts.values()) == len(before.tensors)
    again = open_checkpoint(str(tmp_path / "out"))  # a directory with one GGUF file is a model
    assert again.config == source.config
    for name in again.shapes():
        old, new = (c.read(name).dequantize().numpy() for c in (source, again))
        assert np.abs(new - old).max() <= np.abs(old).max() * (0.01 if kind != "Q4_0" and kind != "Q4_1" else 0.15)


def test_what_is_in_few_bits_already_and_what_is_ignored_stays(tmp_path: Path) -> None:
    source = open_checkpoint(str(smollm2()))  # Q4_1, embedding Q8_0
    _, counts = quantize_gguf(source, tmp_path / "out", "Q4_0", ignore=("*.mlp.*",))
    assert set(counts) == {"F32", "Q4_1", "Q8_0"}
    t0 = open_checkpoint(str(save_t0_gguf(tmp_path / "t0.gguf")))
    path, _ = quantize_gguf(t0, tmp_path / "t0", "Q8_0", ignore=("*.down_proj", "re:.*layers.0.self_attn"))
    kinds = {t.name: t.tensor_type.name for t in GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == "F32"
    assert kinds["blk.1.attn_q.weight"] == kinds["blk.0.ffn_up.weight"] == "Q8_0"


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = t0_weights()
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    bad = open_checkpoint(str(save_t0_gguf(tmp_path / "bad.gguf", weights=weights)))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight.* NaN"):
        quantize_gguf(bad, tmp_path / "out", "Q8_0")
    assert not list((tmp_path / "out").iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(HeadraceError, match="not empty"):
        quantize_gguf(bad, tmp_path / "full", "Q8_0")

    good = str(save_t0_gguf(tmp_path / "good.gguf"))
    base = ["quantize", good, "--format", "gguf", "--output", str(tmp_path / "cli")]
    for more, words in (
        (["--method", "gptq"], "for the methods int8, int4, f16, bf16"),
        (["--method", "int8", "--group-size", "32"], "group_size means nothing"),
        (["--method", "int8", "--no-symmetric"], "symmetric means nothing"),
        (["--method", "int8", "--threads", "1"], "threads means nothing"),
    ):
        assert main([*base, *more]) == 1
        assert words in capsys.readouterr().err
    assert main([*base, "--method", "int4", "--no-symmetric", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == {"Q8_0": 2, "F32": 5, "Q4_1": 14}
