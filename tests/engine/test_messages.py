"""Messages between the processes say on the other side what they said on this one."""

import dataclasses
from typing import Any

import pytest

from headrace import SamplingParams, StructuredOutputs, errors
from headrace.config import EngineConfig
from headrace.engine.messages import Abort, Failed, Load, Loaded, Stop, Submit, Turn, encode, from_engine, to_engine
from headrace.engine.request import Request, TokenDelta
from headrace.engine.stats import EngineStats, ModelInfo
from headrace.sampling.params import LARGEST, TokenLogprob

EVERYTHING = SamplingParams(
    n=2, temperature=0.5, top_k=LARGEST, top_p=0.5, min_p=0.25, seed=-(2**63), max_tokens=LARGEST, min_tokens=1,
    stop=["a", "日本"], stop_token_ids=[0, 5], include_stop_str_in_output=True, ignore_eos=True, logprobs=20,
    prompt_logprobs=0, logit_bias={0: -100.0, 7: 5}, skip_special_tokens=False,
)  # fmt: skip


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), EVERYTHING, SamplingParams(stop="x"),
     SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object", "x": [None, 1.5, True]})),
     SamplingParams(structured_outputs=StructuredOutputs(json=False)),
     SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]))],
)  # fmt: skip
def test_a_request(params: SamplingParams) -> None:
    request = Request(
        "id", [0, 1, 2**31], params, priority=-5, tenant="t", cache_salt="s", queue_timeout=1.5, timeout=2
    )
    message = to_engine(encode(Submit(request)))
    assert isinstance(message, Submit)
    assert message.request == request
    for field in dataclasses.fields(params):  # 1 == 1.0 == True, but they are not the same
        before, after = getattr(params, field.name), getattr(message.request.params, field.name)
        assert type(after) is type(before), field.name


def test_a_config() -> None:
    for config in (EngineConfig(model="x"), EngineConfig(model="x", max_model_len=7, kv_cache_memory="1GiB", seed=-1)):
        message = to_engine(encode(Load(config)))
        assert isinstance(message, Load)
        assert message.config == config


def test_plain_messages() -> None:
    assert to_engine(encode(Abort("id"))) == Abort("id")
    assert to_engine(encode(Stop())) == Stop()
    loaded = Loaded(ModelInfo(1, 2, {"temperature": 0.5}, scheme="Q4_1"), EngineStats(running=3))
    assert from_engine(encode(loaded)) == loaded


def test_deltas() -> None:
    deltas = [
        TokenDelta("id", 0, "é🙂\0", [1]),
        TokenDelta("id", 1, "", [5], [TokenLogprob(5, float("-inf"), [(5, -0.0), (6, -1.5)])],
                   [None, TokenLogprob(1, -2.0)], finish_reason="stop", stop_reason=5, cached_tokens=0, queue_time=0.5),
        TokenDelta("id", 1, "", [], finish_reason="abort", stop_reason="timeout"),
    ]  # fmt: skip
    turn = Turn(EngineStats(running=1), ["a"], {}, deltas)
    assert from_engine(encode(turn)) == turn


ERRORS: list[Any] = [
    errors.HeadraceError("h"), errors.ConfigError("c"), errors.ModelError("m"), errors.CapacityError("ä"),
    errors.RequestError("r"), errors.RequestError("r", "prompt"), errors.OverloadedError("o", 7),
    errors.OverloadedError("o", 7, has_waited=True),
]  # fmt: skip


def test_errors_mean_the_same_on_the_other_side() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {type(error) for error in ERRORS} == kinds, "all there are"
    for error in ERRORS:
        failed = from_engine(encode(Failed(error)))
        delta = TokenDelta("x", 0, "", [], error=error)
        turn = from_engine(encode(Turn(EngineStats(), refused={"x": error}, deltas=[delta])))
        assert isinstance(failed, Failed)
        assert isinstance(turn, Turn)
        for restored in (failed.error, turn.refused["x"], turn.deltas[0].error):
            assert type(restored) is type(error)
            assert str(restored) == str(error)
            assert vars(restored) == vars(error)
