"""/tokenize and /detokenize: T0's tokens are bytes, SmolLM2's are those that the tokenizers library gives."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace.formats.open import open_checkpoint
from headrace.server.config import ServerConfig
from headrace.server.tokenize import detokenized, tokenized
from helpers.http_server import RunningServer
from helpers.model_files import smollm2
from helpers.tiny import BOS, EOS

HI = [{"role": "user", "content": "Hi"}]


def post(server: RunningServer, route: str, **body: Any) -> Any:
    return server.http.post(route, json=body)


def test_a_prompt(server: RunningServer) -> None:
    answer = post(server, "/tokenize", model="T0", prompt="aé<s>").json()
    assert answer == {"count": 4, "max_model_len": 512, "tokens": [97, 0xC3, 0xA9, BOS], "token_strs": None}
    named = post(server, "/tokenize", prompt="aé<s>", return_token_strs=True).json()
    assert named["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<s>"]
    assert post(server, "/tokenize", prompt="").json()["count"] == 0
    assert post(server, "/tokenize", prompt="x" * 5000, add_special_tokens=False).json()["count"] == 5000


def test_a_chat_is_what_the_model_would_get(server: RunningServer) -> None:
    answer = post(server, "/tokenize", messages=[{"role": "user", "content": "<s>"}]).json()
    assert answer["tokens"] == [BOS, *b"user:<s>", EOS, BOS, *b"assistant:"]  # in a message a mark is text
    without = post(server, "/tokenize", messages=HI, add_generation_prompt=False).json()
    assert without["tokens"] == [BOS, *b"user:Hi", EOS]
    going_on = post(
        server, "/tokenize", messages=[*HI, {"role": "assistant", "content": "So"}], continue_final_message=True
    ).json()
    assert going_on["tokens"] == [BOS, *b"user:Hi", EOS, BOS, *b"assistant:So"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for extra in ({}, {"tools": tools}, {"tools": tools, "tool_choice": "none"}):
        counted = post(server, "/tokenize", messages=HI, **extra).json()["count"]
        used = server.post("chat/completions", model="T0", messages=HI, max_tokens=1, **extra).json()["usage"]
        assert counted == used["prompt_tokens"]


def test_the_way_back(server: RunningServer) -> None:
    for text in ("aé<s>", "", "日本 \n", "</s>"):
        tokens = post(server, "/tokenize", prompt=text).json()["tokens"]
        assert post(server, "/detokenize", model="T0", tokens=tokens).json() == {"prompt": text}
    assert post(server, "/detokenize", tokens=[0xC3]).json() == {"prompt": "\ufffd"}


@pytest.mark.parametrize(
    ("route", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": 5}, "prompt", 400),
        ("/tokenize", {"prompt": "x", "messages": HI}, "prompt", 400),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens", 400),
        ("/tokenize", {"prompt": "x", "return_tokens": True}, "return_tokens", 400),
        ("/tokenize", {"prompt": "x", "model": "nope"}, "model", 404),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": "x"}, "tokens", 400),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]", 400),
        ("/detokenize", {"tokens": [259]}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens", 400),
        ("/detokenize", {"tokens": [1], "model": "nope"}, "model", 404),
    ],
)
def test_what_is_refused(server: RunningServer, route: str, body: dict[str, Any], param: str, status: int) -> None:
    response = post(server, route, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


class LikeAnEngine:
    """As much of an engine as these routes need."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = open_checkpoint(str(path), None).tokenizer()
        self.max_model_len, self.vocab_size = 8192, 49152


def test_smollm2_is_tokenized_as_transformers_does() -> None:
    import json

    path = smollm2()
    engine: Any = LikeAnEngine(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("The capital of France is", " word word", "🫠🔥🙂", "1234 5"):
        answer = tokenized(engine, [], json.dumps({"prompt": text}).encode(), ServerConfig())
        assert answer["tokens"] == theirs(text)["input_ids"]
        back = detokenized(engine, [], json.dumps({"tokens": answer["tokens"]}).encode())
        assert back == {"prompt": text}
    chat = tokenized(engine, [], json.dumps({"messages": HI}).encode(), ServerConfig())
    assert chat["count"] == 31
    assert chat["tokens"] == theirs.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)
