"""Request fields that reach the sampler or change the answer, over HTTP on T0, judged by NumPy."""

from pathlib import Path
from typing import Any

import pytest

from helpers.http_server import RunningServer, running_server, t0_greedy, t0_logprobs, t0_text
from helpers.tiny import EOS, save_t0

HI = [{"role": "user", "content": "Hi"}]


def text_of(server: RunningServer, **body: Any) -> str:
    body = {"model": "T0", "prompt": "ab", "max_tokens": 12, "temperature": 0, "ignore_eos": True} | body
    response = server.post("completions", **body)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_which_tokens_may_come(server: RunningServer) -> None:
    assert text_of(server) == t0_text(t0_greedy([*b"ab"], 12))
    assert set(text_of(server, allowed_token_ids=[*b"xyz"])) <= set("xyz")
    only = {"allowed_token_ids": [*b"xy"]}
    assert "x" not in text_of(server, **only, bad_words=["x"])
    assert "xy" not in text_of(server, **only, bad_words=["xy"], temperature=1.0, seed=1)
    assert text_of(server, allowed_token_ids=[*b"x"], bad_words=["x"]) == "x" * 12  # there must be something to say


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": -2},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 30},
        {"dry_multiplier": 5, "dry_allowed_length": 1, "dry_sequence_breakers": []},
    ],
    ids=str,
)
def test_a_penalty_changes_what_is_drawn(server: RunningServer, change: dict[str, Any]) -> None:
    body = {"allowed_token_ids": [*b"xyz"], "temperature": 1.0, "seed": 2}
    plain = text_of(server, **body, max_tokens=20)
    changed = text_of(server, **body, max_tokens=20, **change)
    assert changed != plain


def test_xtc_leaves_out_the_most_likely(server: RunningServer) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "allowed_token_ids": [*b"xy"], "temperature": 1.0}
    logprobs = t0_logprobs((97, 98))[-1]
    less, more = sorted(b"xy", key=lambda token: logprobs[token])
    bias = {str(less): float(logprobs[more] - logprobs[less]) - 0.1}  # nearly as likely: both are top choices
    for seed in range(5):
        assert text_of(server, **body, seed=seed, logit_bias=bias, xtc_probability=1, xtc_threshold=0.3) == chr(less)


def test_why_it_ended(server: RunningServer) -> None:
    def ending(**body: Any) -> tuple[str, Any]:
        choice = server.post("completions", model="T0", prompt="ab", max_tokens=5, temperature=0, **body).json()[
            "choices"
        ][0]
        return choice["finish_reason"], choice["stop_reason"]

    x = {"logit_bias": {"120": 100}}
    assert ending(**x) == ("length", None)
    assert ending(**x, stop=["y", "xx"]) == ("stop", "xx")
    assert ending(**x, stop_token_ids=[120]) == ("stop", 120)
    assert ending(logit_bias={str(EOS): 100}) == ("stop", None)
    assert ending(**x, stop="x", min_tokens=5) == ("length", None)
    chat = server.post("chat/completions", model="T0", messages=HI, max_tokens=5, **x, stop="xxx").json()["choices"][0]
    assert (chat["finish_reason"], chat["stop_reason"], chat["message"]["content"]) == ("stop", "xxx", "")


def test_logprobs_of_a_prompt(server: RunningServer) -> None:
    truth = t0_logprobs((97, 98, 99))
    for prompt in ("abc", [97, 98, 99]):
        body = {"model": "T0", "prompt": prompt, "max_tokens": 1, "prompt_logprobs": 2}
        answer = server.post("completions", **body).json()["choices"][0]
        first, *rest = answer["prompt_logprobs"]
        assert first is None
        for row, token, report in zip(truth, b"bc", rest, strict=False):
            best = [int(t) for t in row.argsort()[::-1][:2]]
            assert set(report) == {str(t) for t in (token, *best)}
            for name, entry in report.items():
                assert entry["logprob"] == pytest.approx(row[int(name)], abs=1e-4)
                assert entry["rank"] == (best.index(int(name)) + 1 if int(name) in best else None)
            assert report[str(token)]["decoded_token"] == chr(token)
    chat = server.post("chat/completions", model="T0", messages=HI, max_tokens=1, prompt_logprobs=0).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    for bad in ({"stream": True}, {"echo": True, "logprobs": 1}):
        refused = server.post("completions", model="T0", prompt="abc", prompt_logprobs=1, **bad)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt_logprobs"


def test_the_models_own_defaults(tmp_path: Path) -> None:
    own = {"temperature": 0.0001, "repetition_penalty": 3.0, "top_k": 5, "eos_token_id": EOS}
    with running_server(save_t0(tmp_path / "T0", generation_config=own)) as server:

        def text(**body: Any) -> str:
            answer = server.post("completions", model="T0", prompt="ab", ignore_eos=True, **body).json()
            said: str = answer["choices"][0]["text"]
            return said

        assert text() == text(temperature=0, repetition_penalty=3.0)
        assert text(repetition_penalty=1.0) == t0_text(t0_greedy([*b"ab"], 16))
        assert text() != text(repetition_penalty=1.0)
