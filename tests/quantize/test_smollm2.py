"""SmolLM2-135M: group sizes that do not fit are refused at once, and INT8 says what the source says."""

import time
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from headrace.quantize.quantizer import Quantizer
from headrace.quantize.settings import QuantizeSettings
from helpers.model_files import smollm2


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_576_columns_are_no_groups_of_128(tmp_path: Path, method: str) -> None:
    """Before any text is read: the dataset does not exist."""
    plan = QuantizeSettings(method=method, dataset="nowhere").plan()
    start = time.process_time()
    words = r"group_size 128 does not divide the 576 columns of model\.layers\.0\.self_attn\.q_proj; 64, 32, 16, 8, -1"
    with pytest.raises(ConfigError, match=words):
        Quantizer(open_checkpoint(str(smollm2())), tmp_path / "out", plan)
    assert time.process_time() - start < 10
    assert not (tmp_path / "out").exists()


def test_int8_begins_as_the_source_does(tmp_path: Path) -> None:
    """The most likely first token after 50 prompts is the same in at least nine of ten; the directory is whole."""
    plan = QuantizeSettings(method="int8").plan()
    reports = Quantizer(open_checkpoint(str(smollm2())), tmp_path / "out", plan).run(None)
    assert len(reports) == 30 * 7
    things = ["river", "mill", "wheel", "city", "song", "book", "road", "king", "tree", "ship"]
    starts = ["The {} is", "In the {} there was", "A {} can", "Why is a {}", "My favourite {}"]
    prompts = [start.format(thing) for start in starts for thing in things]
    answers = []
    for path in (smollm2(), tmp_path / "out"):
        llm = LLM(str(path), max_model_len=64, kv_cache_memory=64 << 20)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        assert llm.tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    same = sum(a == b for a, b in zip(*answers, strict=True))
    assert same >= 45
