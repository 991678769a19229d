"""What requests mean, on SmolLM2: streams, sampling, lengths and templates, told from other engines' bug reports."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from headrace.errors import RequestError
from headrace.formats.tokenizer import Tokenizer
from headrace.server.config import ServerConfig
from headrace.server.tokenize import tokenized
from helpers.full_length import FULL, full_length
from helpers.http_server import RunningServer, running_server
from helpers.model_files import smollm2
from helpers.tiny import BOS, VOCAB, t0_tokenizer

HI = [{"role": "user", "content": "Hi"}]


def words(count: int) -> str:
    """A text of so many tokens."""
    return " word" * count


@pytest.fixture(scope="module")
def smol() -> Iterator[RunningServer]:
    with running_server(smollm2(), {"served_model_name": ["smol", "alias"]}, kv_cache_memory=512 << 20) as running:
        yield running


def complete(smol: RunningServer, **body: Any) -> Any:
    response = smol.post("completions", **{"model": "smol", "temperature": 0} | body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(smol: RunningServer, **body: Any) -> Any:
    response = smol.post("chat/completions", **{"model": "smol", "messages": HI, "temperature": 0} | body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(smol: RunningServer, route: str, **body: Any) -> dict[str, Any]:
    prompt = {"messages": HI} if route.startswith("chat") else {"prompt": "x"}
    response = smol.post(route, **{"model": "smol", "max_tokens": 2} | prompt | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def events(response: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, whose form is checked byte by byte."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.content.decode().split("\n\n")
    assert blocks.pop() == ""
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data)
    assert data.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in data]


class TestStreams:
    @pytest.mark.parametrize("prompt", ["Copy: " + "🫠🔥🙂 " * 2 + "🫠", "日本語" * 4])
    def test_characters_of_several_tokens(self, smol: RunningServer, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 10}
        whole = complete(smol, **body)["choices"][0]["text"]
        chunks = events(smol.post("completions", model="smol", temperature=0, stream=True, **body))
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(texts) == whole
        assert sum(text.count("\ufffd") for text in texts) == whole.count("\ufffd")

    def test_a_stop_string_over_two_tokens(self, smol: RunningServer) -> None:
        body = {"prompt": "Once upon a time", "max_tokens": 10, "logprobs": 1}
        full = complete(smol, **body)["choices"][0]
        tokens, text = full["logprobs"]["tokens"], full["text"]
        for i in range(3, len(tokens) - 1):
            stop = tokens[i][-1:] + tokens[i + 1][:2]
            if text.find(stop) == len("".join(tokens[: i + 1])) - 1:
                break
        cut = text[: text.index(stop)]
        for stops in ([stop], ["never", "occurs", stop]):
            whole = complete(smol, **body, stop=stops)
            assert whole["choices"][0]["text"] == cut
            assert whole["choices"][0]["finish_reason"] == "stop"
            assert whole["choices"][0]["stop_reason"] == stop
            assert whole["usage"]["completion_tokens"] <= i + 2
            chunks = events(smol.post("completions", model="smol", temperature=0, stream=True, **body, stop=stops))
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == cut
        kept = complete(smol, **body, stop=stop, include_stop_str_in_output=True)["choices"][0]
        assert kept["text"] == cut + stop
        held = events(smol.post("completions", model="smol", temperature=0, stream=True, **body, stop=["x" * 20]))
        assert "".join(chunk["choices"][0]["text"] for chunk in held) == text

    def test_usage_only_where_asked_for(self, smol: RunningServer) -> None:
        body = {"model": "smol", "messages": HI, "max_tokens": 5, "temperature": 0, "stream": True}
        for options in (None, {}, {"include_usage": False}):
            chunks = events(smol.post("chat/completions", **body, stream_options=options))
            assert not any(chunk.get("usage") for chunk in chunks)
        *chunks, last = events(smol.post("chat/completions", **body, stream_options={"include_usage": True}))
        assert not any(chunk["usage"] for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == chat(smol, max_tokens=5)["usage"]["completion_tokens"]
        assert last["usage"]["prompt_tokens"] == 31
        error = refused(smol, "chat/completions", stream_options={"include_usage": True})
        assert error["param"] == "stream_options"

    def test_the_form_of_chunks(self, smol: RunningServer) -> None:
        body = {"model": "smol", "messages": HI, "max_tokens": 6, "stream": True}
        chunks = events(smol.post("chat/completions", **body))
        assert len({(c["id"], c["object"], c["created"], c["model"]) for c in chunks}) == 1
        assert chunks[0]["object"] == "chat.completion.chunk"
        assert {c["choices"][0]["index"] for c in chunks} == {0}
        assert [c["choices"][0]["delta"].get("role") for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert len(list(smol.client.chat.completions.create(**body))) > 1

    @full_length
    @pytest.mark.timeout(0)
    def test_the_form_of_chunks_while_a_long_prompt_is_computed(self, smol: RunningServer) -> None:
        """With comments that keep the connection alive, which are nothing to the client."""
        with ThreadPoolExecutor() as pool:
            long = pool.submit(complete, smol, prompt=words(6000), max_tokens=1)
            while not long.done():
                self.test_the_form_of_chunks(smol)
            body = {"model": "smol", "prompt": words(7000), "max_tokens": 1, "stream": True}
            response = smol.post("completions", **body)
        assert len(events(response)) == 1
        assert b"\n\n: keep-alive\n\n" in b"\n\n" + response.content, "the prompt was too short to be waited for"


class TestSampling:
    def test_a_seed_decides_whatever_runs_beside_it(self, smol: RunningServer) -> None:
        rounds = 5 if FULL else 1
        seeded = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0, "seed": 1234}
        free = {"prompt": words(40), "max_tokens": 64 if FULL else 24, "temperature": 1.3}
        alone = complete(smol, **seeded)["choices"][0]["text"]

        def together(*bodies: dict[str, Any]) -> list[str]:
            """The texts of requests that begin one after the other, 20 ms apart."""
            with ThreadPoolExecutor() as pool:
                running = []
                for body in bodies:
                    running.append(pool.submit(complete, smol, **body))
                    time.sleep(0.02)
                return [answer.result()["choices"][0]["text"] for answer in running]

        others = []
        for _ in range(rounds):
            first, text = together(free, seeded)
            assert text == alone
            text, second = together(seeded, free)
            assert text == alone
            others += [first, second]
        assert len(set(others)) == len(others)
        seeds = [seeded | {"seed": seed} for seed in (1, 1234, 3, 4, 5)]
        assert together(*seeds)[1] == alone
        assert together(*reversed(seeds))[3] == alone

    def test_greedy_takes_the_first_of_the_list(self, smol: RunningServer) -> None:
        results = []
        for extra in ({}, {"top_p": 0.1}, {"seed": 2}):
            choice = complete(smol, prompt="The capital of France is", max_tokens=3, logprobs=5, **extra)["choices"][0]
            results.append((choice["text"], choice["logprobs"]["token_logprobs"]))
            for chosen, top in zip(
                choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True
            ):
                values = list(top.values())
                assert chosen == values[0] == max(values)
                assert values == sorted(values, reverse=True)
                assert len(values) == 5
                assert all(value <= 0 for value in values)
                assert 0.05 < sum(2.718281828**value for value in values) <= 1 + 1e-5
        assert all(result == results[0] for result in results)
        entries = chat(smol, max_tokens=4, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"]
        assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in entries)

    def test_logprobs_without_a_number(self, smol: RunningServer) -> None:
        for extra in ({}, {"top_logprobs": 0}):
            choice = chat(smol, max_tokens=4, logprobs=True, **extra)["choices"][0]
            entries = choice["logprobs"]["content"]
            assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in entries)
            assert all(entry["top_logprobs"] == [] for entry in entries)
            spelled = bytes(byte for entry in entries for byte in entry["bytes"] or [])
            assert spelled.decode() == choice["message"]["content"]
        three = chat(smol, max_tokens=4, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
        assert all(len(entry["top_logprobs"]) == 3 for entry in three)
        for bad in (
            {"top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 21},
            {"logprobs": True, "top_logprobs": -1},
        ):
            assert refused(smol, "chat/completions", **bad)["param"] == "top_logprobs"

    def test_which_penalties_count_the_prompt(self, smol: RunningServer) -> None:
        prompt = " 1" * 8
        plain = complete(smol, prompt=prompt, max_tokens=1, logprobs=0)["choices"][0]
        assert plain["logprobs"]["tokens"] == [" "]
        of_output = complete(smol, prompt=prompt, max_tokens=1, presence_penalty=2, frequency_penalty=2)
        assert of_output["choices"][0]["text"] == plain["text"]
        assert complete(smol, prompt=prompt, max_tokens=1, repetition_penalty=10)["choices"][0]["text"] != plain["text"]
        without = complete(smol, prompt=prompt, max_tokens=8)["choices"][0]["text"]
        with_it = complete(smol, prompt=prompt, max_tokens=8, frequency_penalty=2, logprobs=0)["choices"][0]
        assert with_it["text"] != without
        tokens = with_it["logprobs"]["tokens"]
        assert max(tokens.count(token) for token in tokens) < 4

    def test_biases(self, smol: RunningServer) -> None:
        for bad in ({"49152": -100}, {"-1": 5}, {"abc": 1}, {"5": 1000}, {"5": "x"}, {"5": None}, []):
            assert refused(smol, "chat/completions", logit_bias=bad)["param"] == "logit_bias"
        plain = chat(smol, max_tokens=2)["choices"]
        for nothing in ({}, None):
            assert chat(smol, max_tokens=2, logit_bias=nothing)["choices"] == plain
        assert chat(smol, max_tokens=2, logit_bias={"17": 100})["choices"][0]["message"]["content"] == "!!"

    def test_ends_of_the_filters(self, smol: RunningServer) -> None:
        def texts(**body: Any) -> list[str]:
            with ThreadPoolExecutor(8) as pool:
                asked = {"prompt": "Once upon a", "max_tokens": 1, "temperature": 2.0} | body
                seeds = range(1, 41 if FULL else 13)
                return list(pool.map(lambda seed: complete(smol, **asked, seed=seed)["choices"][0]["text"], seeds))

        greedy = complete(smol, prompt="Once upon a", max_tokens=1)["choices"][0]["text"]
        free = texts()
        assert len(set(free)) >= 5
        for k in (0, -1, 1_000_000):
            assert texts(top_k=k) == free
        for only in ({"top_k": 1}, {"min_p": 1.0}):
            assert set(texts(**only)) == {greedy}
        assert refused(smol, "completions", top_k=-2)["param"] == "top_k"
        assert refused(smol, "completions", min_p=1.5)["param"] == "min_p"
        assert refused(smol, "completions", top_p=0)["param"] == "top_p"

    def test_limits_of_an_answer(self, smol: RunningServer) -> None:
        assert complete(smol, prompt="test", max_tokens=None)["usage"]["completion_tokens"] <= 16
        assert chat(smol, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
        assert chat(smol, max_tokens=3, max_completion_tokens=5)["usage"]["completion_tokens"] == 3
        assert refused(smol, "chat/completions", max_tokens=0)["param"] == "max_tokens"
        assert refused(smol, "completions", max_tokens=-5)["param"] == "max_tokens"

    def test_usage_of_several_prompts(self, smol: RunningServer) -> None:
        body = {
            "prompt": [words(7), words(11)],
            "n": 2,
            "max_tokens": 5,
            "ignore_eos": True,
            "temperature": 1,
            "seed": 1,
        }
        for _ in range(2):
            answer = complete(smol, **body)
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            usage = answer["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (18, 20, 38)
            assert usage["prompt_tokens_details"]["cached_tokens"] <= 18
            streamed = events(
                smol.post("completions", model="smol", stream=True, stream_options={"include_usage": True}, **body)
            )
            assert streamed[-1]["usage"]["total_tokens"] == 38


class TestLengths:
    @pytest.mark.parametrize("stream", [False, True])
    def test_nothing_is_cut_from_a_prompt(self, smol: RunningServer, stream: bool) -> None:
        for route, prompt in (
            ("completions", {"prompt": words(9000)}),
            ("chat/completions", {"messages": [{"role": "system", "content": "The secret is ANANAS-7734."},
                                               {"role": "user", "content": words(9000)}]}),
        ):  # fmt: skip
            assert "8192" in refused(smol, route, **prompt, max_tokens=8, stream=stream)["message"]

    def test_empty_prompts(self, smol: RunningServer) -> None:
        for prompt in ("", [""], [], [[]], ["ok", ""]):
            assert refused(smol, "completions", prompt=prompt)["param"].startswith("prompt")
        assert refused(smol, "chat/completions", messages=[])["param"] == "messages"
        assert chat(smol, messages=[{"role": "user", "content": ""}], max_tokens=1)["usage"]["prompt_tokens"] == 30
        for prompt in (" ", "\t", "\n\n\n", "   "):
            assert complete(smol, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"] == 1


REFUSING = (
    "{% if messages[0].role=='system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% if (m.role=='user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)


def prompt_of(template: str, *messages: tuple[str, str]) -> list[int]:
    """What the server makes of a chat for T0 with this template."""
    engine: Any = SimpleNamespace(
        tokenizer=Tokenizer(t0_tokenizer(), chat_templates={"default": template}, special_tokens={"bos_token": "<s>"}),
        max_model_len=512,
        vocab_size=VOCAB,
    )
    body = {"messages": [{"role": role, "content": content} for role, content in messages]}
    ids: list[int] = tokenized(engine, [], json.dumps(body).encode(), ServerConfig())["tokens"]
    return ids


class TestTemplates:
    def test_one_that_refuses(self) -> None:
        for roles, words_of in (
            (["system", "user"], "no system role"),
            (["user", "user"], "roles must alternate"),
            (["assistant"], "roles must alternate"),
        ):
            with pytest.raises(RequestError, match=words_of):
                prompt_of(REFUSING, *((role, "x") for role in roles))
        assert prompt_of(REFUSING, ("user", "x"), ("assistant", "y"), ("user", "z")) == [*b"xyz"]

    @pytest.mark.parametrize(
        "template", ["{% for i in range(10**12) %}x{% endfor %}", "{{ ().__class__.__base__ }}", "{{ 'a' * 10**12 }}"]
    )
    def test_one_that_does_harm(self, template: str) -> None:
        with pytest.raises(RequestError, match="template"):
            prompt_of(template, ("user", "x"))

    def test_one_beginning_of_sequence(self, smol: RunningServer) -> None:
        assert chat(smol, max_tokens=1)["usage"]["prompt_tokens"] == 31
        template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
        assert prompt_of(template, ("user", "abc")) == [BOS, *b"abc"]

    def test_content_in_parts(self, smol: RunningServer) -> None:
        def of_user(content: Any) -> dict[str, Any]:
            return {"messages": [{"role": "user", "content": content}], "max_tokens": 1}

        def text(part: str) -> dict[str, Any]:
            return {"type": "text", "text": part}

        assert chat(smol, **of_user([text("Hi")]))["usage"]["prompt_tokens"] == 31
        joined = chat(smol, **of_user([text("Hel"), text("lo")]))["usage"]["prompt_tokens"]
        assert joined == chat(smol, **of_user("Hello"))["usage"]["prompt_tokens"]
        assert chat(smol, **of_user([]))["usage"]["prompt_tokens"] == 30
        for bad in ([{"type": "image_url", "image_url": {"url": "data:,"}}], [{"type": "text"}], ["Hi"]):
            assert refused(smol, "chat/completions", **of_user(bad))["param"].startswith("messages[0].content")
        system = {"messages": [{"role": "system", "content": [text("S")]}, *HI], "max_tokens": 1}
        assert chat(smol, **system)["usage"]["prompt_tokens"] == 16


class TestNames:
    def test_of_the_model(self, smol: RunningServer) -> None:
        for name in ("nope", "SMOL", str(smollm2())):
            response = smol.post("completions", model=name, prompt="x")
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["code"] == "model_not_found"
            assert "'smol'" in error["message"]
            assert "'alias'" in error["message"]
        assert refused(smol, "completions", model="")["param"] == "model"
        for name in ("smol", "alias"):
            assert complete(smol, model=name, prompt="x", max_tokens=1)["model"] == name
        assert [model.id for model in smol.client.models.list()] == ["smol", "alias"]
        with pytest.raises(openai.NotFoundError):
            smol.client.models.retrieve("nope")


SAVE_NOTE = {
    "type": "function",
    "function": {
        "name": "save_note",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class TestTools:
    @pytest.mark.parametrize("limit", [1, 4, 8, 12, 16, 24, 32, 400] if FULL else [1, 8, 16, 32])
    def test_a_call_cut_by_the_limit(self, smol: RunningServer, limit: int) -> None:
        body: dict[str, Any] = {
            "model": "smol",
            "messages": [{"role": "user", "content": "Save a long note about rivers."}],
            "tools": [SAVE_NOTE],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": limit,
        }
        whole = smol.client.chat.completions.create(**body).choices[0]
        arguments = [call.function.arguments for call in whole.message.tool_calls or []]
        pieces = [""] * len(arguments)
        for chunk in smol.client.chat.completions.create(**body, stream=True):
            for call in chunk.choices[0].delta.tool_calls or []:
                pieces[call.index] += call.function.arguments or ""
            reason = chunk.choices[0].finish_reason or None
        assert pieces == arguments
        assert reason == whole.finish_reason
        if whole.finish_reason == "tool_calls":
            assert all("text" in json.loads(each) for each in arguments)
        else:
            assert whole.finish_reason == "length"
