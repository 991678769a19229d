"""What SamplingParams takes and refuses."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import RequestError
from headrace.sampling.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

HUGE = 10**5000  # Python refuses to print it
NAN = math.nan

GOOD = [
    {},
    {"n": MAX_N, "temperature": 0, "seed": -(2**63), "max_tokens": None},
    {"temperature": 100.0, "seed": 2**63 - 1, "top_p": 1, "min_p": 1.0},
    {"temperature": 1e-300, "top_p": 1e-300, "min_p": 0},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 2**63 - 1, "max_tokens": 2**63 - 1, "min_tokens": 2**63 - 1},
    {"min_tokens": 16},
    {"min_tokens": 1000, "max_tokens": None},
    {"stop": "\n"},
    {"stop": []},
    {"stop": ["a"] * MAX_STOP_STRINGS},
    {"stop": ("a", "b" * MAX_STOP_LENGTH)},
    {"stop_token_ids": []},
    {"stop_token_ids": [0, 2, HUGE]},
    {"logprobs": 0, "prompt_logprobs": MAX_LOGPROBS},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 5: 100.0, 7: 0.5}},
    {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
    {"repetition_penalty": 100, "bad_words": [], "allowed_token_ids": [0]},
    {"xtc_probability": 1, "xtc_threshold": 0.5, "dry_multiplier": 0.8, "dry_sequence_breakers": []},
    {"dry_base": 1, "dry_allowed_length": 256, "bad_words": ["damn", " it"]},
    {"ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False},
]

BAD = {
    "structured_outputs": [1, "json", {"json": {}}],
    "n": [0, -1, MAX_N + 1, HUGE, 1.0, True, None, "1", [1], np.int64(2)],
    "temperature": [-0.1, 100.1, NAN, math.inf, -math.inf, 10**400, HUGE, True, None, "0.5", [0.5], 1j],
    "top_k": [-2, -HUGE, HUGE, 2**63, 1.5, 5.0, True, None, "5", [], NAN],
    "top_p": [0, 0.0, -0.0, -0.5, 1.01, NAN, math.inf, HUGE, True, None, "1", {}],
    "min_p": [-0.1, 1.5, NAN, HUGE, False, None, "0"],
    "xtc_probability": [-0.1, 1.1, NAN, True, None, "0"],
    "xtc_threshold": [-0.1, 1.1, NAN, True, None, "0"],
    "presence_penalty": [-2.1, 2.000001, NAN, math.inf, HUGE, True, None, "0"],
    "frequency_penalty": [-2.1, 2.000001, NAN, -math.inf, True, None, []],
    "repetition_penalty": [0, -1, 0.001, 100.5, NAN, math.inf, 1e308, True, None],
    "dry_multiplier": [-1, 101, NAN, True, None],
    "dry_base": [0, 0.99, 101, NAN, True, None],
    "dry_allowed_length": [0, -1, 257, 2.0, True, None],
    "dry_sequence_breakers": [5, "a", [""], [1], ["a"] * 65, ["x" * 65], ["\ud800"]],
    "seed": [2**63, -(2**63) - 1, HUGE, 1.0, True, "1", NAN],
    "max_tokens": [0, -5, 1.0, True, "16", NAN],
    "min_tokens": [-1, 17, HUGE, 0.0, None, True, "1"],
    "stop": [
        *[5, True, {"a": 1}, b"x", "", [""], ["a", None], [1], [HUGE], [["a"]], {"a"}],
        *[["a"] * (MAX_STOP_STRINGS + 1), "x" * (MAX_STOP_LENGTH + 1)],
    ],
    "stop_token_ids": [
        *[5, 0, True, "12", "", [-1], ["2"], [1.0], [True], [None], {1: 2}, [-HUGE], [NAN], [[1]]],
        [1] * (MAX_STOP_TOKEN_IDS + 1),
    ],
    "allowed_token_ids": [5, "", [], [-1], ["2"], [True], [1.0], {1: 2}, [1] * (MAX_ALLOWED_TOKEN_IDS + 1)],
    "bad_words": [5, "word", [""], [None], ["a"] * (MAX_BAD_WORDS + 1), ["x" * (MAX_BAD_WORD_LENGTH + 1)], ["\udfff"]],
    "include_stop_str_in_output": [1, 0, "true", None],
    "ignore_eos": [1, None, "false", np.True_],
    "skip_special_tokens": [0, None, []],
    "speculative": [0, None, "no"],
    "logprobs": [-1, MAX_LOGPROBS + 1, True, False, 1.0, "5", HUGE],
    "prompt_logprobs": [-1, MAX_LOGPROBS + 1, True, "5", NAN],
    "logit_bias": [
        *[[], 0, "", False, 5, "x", [(1, 2)], {-1: 5}, {"1": 5}, {1.0: 5}, {True: 5}, {None: 1}, {-HUGE: 1}],
        *[{5: 1000}, {5: -100.5}, {5: "x"}, {5: None}, {5: NAN}, {5: True}, {5: HUGE}, {5: [1]}],
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
    ],
}


@pytest.mark.parametrize("given_settings", GOOD, ids=lambda s: ",".join(s))
def test_good_settings_are_taken_as_they_are(given_settings):
    params = SamplingParams(**given_settings)
    for name, value in given_settings.items():
        assert getattr(params, name) == value


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_refused_by_name_in_one_short_line(name):
    for value in BAD[name]:
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{name: value})
        message = str(caught.value)
        assert caught.value.param == name, value
        assert name in message
        assert "\n" not in message
        assert len(message) < 200


def test_every_setting_is_tested_here():
    assert set(BAD) == set(SamplingParams.__dataclass_fields__)


simple = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(max_size=5)
anything = st.recursive(
    simple | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(list(BAD)), anything, max_size=4))
def test_whatever_comes_is_taken_or_refused_but_never_crashes(given_settings):
    with contextlib.suppress(RequestError):
        SamplingParams(**given_settings)


def test_stop_strings_is_always_a_list():
    assert SamplingParams().stop_strings == []
    assert SamplingParams(stop="ab").stop_strings == ["ab"]
    assert SamplingParams(stop=["a", "b"]).stop_strings == ["a", "b"]
