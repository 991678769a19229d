"""Tokens as bytes, judged by the text that they came from."""

import pytest

from headrace.formats.open import open_checkpoint
from headrace.formats.tokenizer import Tokenizer
from headrace.server.logprobs import token_name
from helpers.model_files import gemma3, smollm2

TEXTS = [
    "The capital of France is Paris.",
    "naïve café — 日本語 العربية हिन्दी",
    "🙂🫠🔥 👩‍👩‍👧 e\u0301 \u200d",
    "def f(x):\n\treturn x ** 2  # ok\n\n\n    done",
    "\ufffd\x00\x7f\xad",
    "鿿\U0001f9ff\U00020000",
]


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["smollm2", "gemma3"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return open_checkpoint(str(request.param())).tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_all_tokens_are_the_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) or b"" for token in ids) == text.encode()


def test_names(tokenizer: Tokenizer) -> None:
    [*_, word] = tokenizer.encode("the Paris", add_special_tokens=False)
    assert token_name(tokenizer, word) == (" Paris", b" Paris")
    names = [token_name(tokenizer, token) for token in tokenizer.encode("\U00020000", add_special_tokens=False)]
    assert "".join(name for name, _ in names) == "".join(f"bytes:\\x{b:02x}" for b in "\U00020000".encode())
    special = min(tokenizer.special_ids)
    assert token_name(tokenizer, special) == (tokenizer.token_text(special), None)
    assert token_name(tokenizer, tokenizer.vocab_size) == ("", None)  # a row that pads the model's matrix
