"""The official client, unchanged, against T0; the answers are judged by T0's NumPy forward pass."""

import openai
import pytest

from helpers.http_server import RunningServer, t0_greedy, t0_logprobs, t0_text
from helpers.tiny import EOS

HI = [{"role": "user", "content": "Hi"}]
HI_IDS = [256, *b"user:Hi", 257, 256, *b"assistant:"]  # by the template


def test_models(server: RunningServer) -> None:
    [model] = server.client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("T0", "model", "headrace")
    assert server.client.models.retrieve("T0") == model
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("T1")


def test_a_completion_is_the_most_likely_text(server: RunningServer) -> None:
    answer = server.client.completions.create(
        model="T0", prompt="abc", max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "T0"
    assert answer.choices[0].text == t0_text(t0_greedy([*b"abc"], 12))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 12, 15)


def test_a_chat_follows_the_template(server: RunningServer) -> None:
    answer = server.client.chat.completions.create(
        model="T0", messages=HI, max_completion_tokens=9, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == t0_text(t0_greedy(HI_IDS, 9))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(HI_IDS), 9)


def test_a_streamed_chat_is_the_whole_one(server: RunningServer) -> None:
    settings = {"model": "T0", "messages": HI, "max_tokens": 40, "temperature": 0, "extra_body": {"ignore_eos": True}}
    whole = server.client.chat.completions.create(**settings)
    chunks = list(server.client.chat.completions.create(**settings, stream=True))
    assert {(c.id, c.object, c.created, c.model) for c in chunks} == {
        (chunks[0].id, "chat.completion.chunk", chunks[0].created, "T0")
    }
    assert [c.choices[0].delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {c.choices[0].index for c in chunks} == {0}


def test_a_streamed_completion_is_the_whole_one(server: RunningServer) -> None:
    settings = {"model": "T0", "prompt": "xyz", "max_tokens": 40, "temperature": 1.0, "seed": 5, "logprobs": 2}
    whole = server.client.completions.create(**settings).choices[0]
    chunks = [c.choices[0] for c in server.client.completions.create(**settings, stream=True)]
    assert "".join(c.text for c in chunks) == whole.text
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [item for c in chunks if c.logprobs for item in getattr(c.logprobs, field)]
        assert pieces == getattr(whole.logprobs, field)


def test_chat_logprobs(server: RunningServer) -> None:
    answer = server.client.chat.completions.create(
        model="T0", messages=HI, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    ids = t0_greedy(HI_IDS, 6)
    truth = t0_logprobs(tuple(HI_IDS + ids))[len(HI_IDS) - 1 : -1]
    for entry, token, row in zip(entries, ids, truth, strict=True):
        best = row.argsort()[::-1][:3]
        assert entry.logprob == pytest.approx(row[token], abs=1e-4)
        assert [t.logprob for t in entry.top_logprobs] == pytest.approx(list(row[best]), abs=1e-4)
        assert entry.bytes == [token]
        assert [t.bytes for t in entry.top_logprobs] == [[int(b)] if b < 256 else None for b in best]
    assert bytes(b for e in entries for b in e.bytes or []).decode("utf-8", "replace") == t0_text(ids)
    plain = server.client.chat.completions.create(model="T0", messages=HI, max_tokens=2, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert [e.top_logprobs for e in plain.choices[0].logprobs.content or []] == [[], []]


def test_completion_logprobs_with_echo(server: RunningServer) -> None:
    prompt = "a é b"
    answer = server.client.completions.create(
        model="T0", prompt=prompt, max_tokens=3, temperature=0, logprobs=2, echo=True, logit_bias={"120": 100}
    )
    choice = answer.choices[0]
    assert choice.text == prompt + "xxx"
    ids = [*prompt.encode(), 120, 120, 120]
    truth = t0_logprobs(tuple(ids))
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", " ", "bytes:\\xc3", "bytes:\\xa9", " ", "b", "x", "x", "x"]
    assert choice.logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    expected = [truth[i, token] for i, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[0] is None
    for i, (top, token) in enumerate(zip(choice.logprobs.top_logprobs[1:], ids[1:], strict=True)):
        # The two most likely tokens, and the token itself where it is none of them.
        wanted = {float(truth[i, t]) for t in (*truth[i].argsort()[::-1][:2], token)}
        assert sorted(top.values()) == pytest.approx(sorted(wanted), abs=1e-4)


def test_n_choices_of_several_prompts(server: RunningServer) -> None:
    settings = {"model": "T0", "max_tokens": 5, "temperature": 1.0, "seed": 7, "extra_body": {"ignore_eos": True}}
    both = server.client.completions.create(prompt=["one", "three"], n=2, **settings)
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None
    assert (both.usage.prompt_tokens, both.usage.completion_tokens) == (3 + 5, 4 * 5)
    for prompt, choices in (("one", both.choices[:2]), ("three", both.choices[2:])):
        alone = server.client.completions.create(prompt=prompt, n=2, **settings)
        assert [c.text for c in alone.choices] == [c.text for c in choices]
        assert choices[0].text != choices[1].text


def test_n_streams_interleave_by_index(server: RunningServer) -> None:
    settings = {"model": "T0", "messages": HI, "n": 3, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    whole = server.client.chat.completions.create(**settings)
    texts = ["", "", ""]
    reasons: list[str | None] = [None] * 3
    usage = []
    for chunk in server.client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        usage.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert usage[-1] == whole.usage
    assert set(usage[:-1]) == {None}


def test_a_stop_string_ends_the_text_before_itself(server: RunningServer) -> None:
    forced = {"model": "T0", "prompt": "q", "max_tokens": 20, "temperature": 0}
    # A bias on 'a' and 'b' leaves the model to choose between them, so the text has both.
    full = server.client.completions.create(**forced, logit_bias={"97": 100, "98": 100}).choices[0].text
    assert set(full) <= {"a", "b"}
    stop = full[5:8]
    cut = server.client.completions.create(**forced, logit_bias={"97": 100, "98": 100}, stop=["never", stop])
    assert cut.choices[0].text == full[: full.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    pieces = server.client.completions.create(**forced, logit_bias={"97": 100, "98": 100}, stop=stop, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == full[: full.index(stop)]


def test_end_of_sequence_and_its_switches(server: RunningServer) -> None:
    ending = {"model": "T0", "prompt": "q", "max_tokens": 6, "temperature": 0, "logit_bias": {str(EOS): 100}}
    answer = server.client.completions.create(**ending)
    assert answer.usage is not None
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1
    on = server.client.completions.create(**ending, extra_body={"ignore_eos": True})
    assert on.usage is not None
    assert (on.choices[0].finish_reason, on.usage.completion_tokens) == ("length", 6)
    shown = server.client.completions.create(**ending, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert shown.choices[0].text == "</s>" * 6
    later = server.client.completions.create(**ending, extra_body={"min_tokens": 3})
    assert later.usage is not None
    assert (later.choices[0].finish_reason, later.usage.completion_tokens) == ("stop", 4)
    token = server.client.completions.create(
        model="T0", prompt="q", logit_bias={"120": 100}, extra_body={"stop_token_ids": [120]}
    )
    assert (token.choices[0].text, token.choices[0].finish_reason) == ("", "stop")


def test_text_prompts_and_token_prompts_are_the_same(server: RunningServer) -> None:
    settings = {"model": "T0", "max_tokens": 5, "temperature": 0}
    texts = [
        server.client.completions.create(prompt=prompt, **settings).choices[0].text
        for prompt in ("hey", ["hey"], [104, 101, 121], [[104, 101, 121]])
    ]
    assert len(set(texts)) == 1


def test_a_completion_has_16_tokens_by_default_and_a_chat_fills_the_context(server: RunningServer) -> None:
    short = server.client.completions.create(model="T0", prompt="q", extra_body={"ignore_eos": True})
    assert short.usage is not None
    assert short.usage.completion_tokens == 16
    long = server.client.chat.completions.create(
        model="T0", messages=[{"role": "user", "content": "x" * 460}], extra_body={"ignore_eos": True}
    )
    assert long.usage is not None
    assert long.usage.total_tokens == 512
    assert long.choices[0].finish_reason == "length"


def test_the_smaller_of_both_limits_counts(server: RunningServer) -> None:
    answer = server.client.chat.completions.create(
        model="T0", messages=HI, max_tokens=3, max_completion_tokens=5, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_continuing_the_final_message(server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Hel"}]
    answer = server.client.chat.completions.create(
        model="T0", messages=messages, max_tokens=4, temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False, "ignore_eos": True},
    )  # fmt: skip
    prompt = [256, *b"user:Hi", 257, 256, *b"assistant:Hel"]
    assert answer.choices[0].message.content == t0_text(t0_greedy(prompt, 4))


def test_parts_are_joined_and_developers_are_systems(server: RunningServer) -> None:
    def prompt_tokens(*messages: dict[str, object]) -> int:
        answer = server.client.chat.completions.create(model="T0", messages=messages, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert prompt_tokens({"role": "user", "content": parts}) == len(HI_IDS)
    system = prompt_tokens({"role": "system", "content": "S"}, *HI)
    assert prompt_tokens({"role": "developer", "content": parts[:1]}, *HI) == system == len(HI_IDS) + 10
    assert prompt_tokens({"role": "user", "content": "<s></s>"}) == len(HI_IDS) - 2 + 7  # text, not control tokens


def test_errors_have_the_clients_types(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        server.client.chat.completions.create(model="gpt-7", messages=HI)
    assert unknown.value.code == "model_not_found"
    assert "'T0'" in str(unknown.value)
    with pytest.raises(openai.BadRequestError) as too_long:
        server.client.completions.create(model="T0", prompt="x" * 100, max_tokens=500)
    assert too_long.value.code == "context_length_exceeded"
    assert {"512", "100", "500"} <= set(too_long.value.message.replace(",", "").split())
    with pytest.raises(openai.BadRequestError) as range_error:
        server.client.chat.completions.create(model="T0", messages=HI, top_p=1.5)
    assert range_error.value.param == "top_p"
    assert range_error.value.request_id is not None
    assert range_error.value.request_id.startswith("req_")
    with pytest.raises(openai.BadRequestError, match="store is not supported yet"):
        server.client.chat.completions.create(model="T0", messages=HI, store=True)
