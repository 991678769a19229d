"""Outputs that keep to a grammar, whatever else the request asks for and whatever runs beside it."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import LLM, SamplingParams, StructuredOutputs
from headrace.engine.request import Request
from helpers.t0_engine import random_prompt, t0_llm
from helpers.tiny import EOS, save_t0

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 3}, "tag": {"enum": ["a", "b"]}, "ok": {"type": "boolean"}},
    "required": ["id", "tag", "ok"],
    "additionalProperties": False,
}
SPECS = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex=r"[0-9]{3}-[a-z]{2,4}"),
    "choice": StructuredOutputs(choice=["yes", "no", "perhaps"]),
    "grammar": StructuredOutputs(grammar='start: "(" start ")" | "x" | "y"'),
}


def fits(kind: str, text: str) -> bool:
    if kind == "json":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "regex":
        return re.fullmatch(r"[0-9]{3}-[a-z]{2,4}", text) is not None
    if kind == "choice":
        return text in ("yes", "no", "perhaps")
    return re.fullmatch(r"(\(*)[xy](\)*)", text) is not None and text.count("(") == text.count(")")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("T0") / "T0")


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return t0_llm(directory)


def run(llm: LLM, kinds: list[str | None], **params: Any) -> list[list[tuple[str, str | None]]]:
    """Text and finish reason of each sequence. A kind of None is a request without a grammar."""
    settings_of = [
        SamplingParams(
            **({"max_tokens": 200, "seed": 5 + i} | params), structured_outputs=None if kind is None else SPECS[kind]
        )
        for i, kind in enumerate(kinds)
    ]
    prompts = [random_prompt(5 + 9 * i) for i in range(len(kinds))]
    outputs = llm.generate(prompts, settings_of, use_tqdm=False)
    return [[(c.text, c.finish_reason) for c in o.outputs] for o in outputs]


ALL = [*SPECS, None, *SPECS]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"n": 3},
        {"temperature": 2.0, "ignore_eos": True},
        {"min_tokens": 100},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "dry_multiplier": 2.0},
        {"bad_words": ["{", "0", "y", "x", "(", "-"], "logit_bias": {ord("{"): -100, ord("y"): 50}},
        {"allowed_token_ids": [5, 6]},
        {"top_k": 1, "min_p": 1.0, "xtc_probability": 1.0},
    ],
    ids=str,
)
def test_every_output_fits_its_grammar(llm: LLM, params: dict[str, Any]) -> None:
    for kind, sequences in zip(ALL, run(llm, ALL, **params), strict=True):
        assert len(sequences) == params.get("n", 1)
        for text, reason in sequences:
            if kind is not None and reason == "stop":
                assert fits(kind, text), (kind, text)
            elif kind in ("regex", "choice"):  # these cannot be long
                raise AssertionError((kind, text, reason))


def test_the_choice_is_drawn_by_the_models_own_probabilities(llm: LLM) -> None:
    """The first token of a constrained output is the most likely one of those that are allowed."""
    prompt = random_prompt(20)
    free = SamplingParams(temperature=0, max_tokens=1, logprobs=0, allowed_token_ids=[*b"ynp"])
    held = SamplingParams(temperature=0, max_tokens=1, logprobs=0, structured_outputs=SPECS["choice"])
    first, second = (llm.generate([prompt], p, use_tqdm=False)[0].outputs[0] for p in (free, held))
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs  # those of the model, as always
    assert second.finish_reason == "length"


def test_alone_and_together_and_preempted_it_says_the_same(directory: Path, llm: LLM) -> None:
    kinds = ["json", None, "json", "regex", None, "grammar"]
    together = run(llm, kinds, n=2, max_tokens=60, ignore_eos=True)
    tight = t0_llm(directory, kv_cache_memory=10 * 16 * 512, block_size=16, max_model_len=150)
    assert run(tight, kinds, n=2, max_tokens=60, ignore_eos=True) == together
    assert tight.engine.stats().num_preemptions > 0
    chunked = t0_llm(directory, max_num_batched_tokens=16, max_num_seqs=4)
    assert run(chunked, kinds, n=2, max_tokens=60, ignore_eos=True) == together
    assert {reason for sequences in together for _, reason in sequences} >= {"stop", "length"}


def test_limits_and_stop_strings_cut_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, structured_outputs=SPECS["json"])
    [output] = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
    assert output.finish_reason == "length"
    stopped = SamplingParams(temperature=0, max_tokens=100, stop='"id', structured_outputs=SPECS["json"])
    [output] = llm.generate([[1, 2]], stopped, use_tqdm=False)[0].outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", '"id')
    assert output.text.strip() == "{"


def test_what_ends_with_the_last_token_allowed_has_not_been_cut(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, structured_outputs=StructuredOutputs(choice=["no"]))
    [output] = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("no", "stop", 2)


def test_where_the_grammar_may_end_or_go_on_the_model_decides(llm: LLM) -> None:
    spec = StructuredOutputs(regex="a+")
    for bias, expected in (({EOS: 100}, ("a", "stop")), ({EOS: -100}, ("a" * 9, "length"))):
        params = SamplingParams(temperature=0, max_tokens=9, logit_bias=bias, structured_outputs=spec)
        [output] = llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs
        assert (output.text, output.finish_reason) == expected
    ends = SamplingParams(temperature=0, logit_bias={EOS: 100}, ignore_eos=True, structured_outputs=spec)
    [output] = llm.generate([[1, 2]], ends, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason) == ("a", "stop")


def test_a_request_can_be_aborted_while_its_grammar_is_compiled(llm: LLM) -> None:
    engine = llm.engine
    big = StructuredOutputs(json={"enum": [f"{i:x}" for i in range(20_000)]})
    engine.add_request(Request("gone", [1], SamplingParams(structured_outputs=big, n=3)))
    assert engine.has_work
    assert [d.finish_reason for d in engine.abort("gone")] == ["abort"] * 3
    while engine.has_work:
        assert engine.step() == []
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks)


def test_a_grammar_that_was_not_checked_ends_with_its_error(llm: LLM) -> None:
    engine = llm.engine
    bad = SamplingParams(structured_outputs=StructuredOutputs(regex="(a"), n=2)
    engine.add_request(Request("bad", [1], bad))
    deltas = []
    while engine.has_work:
        deltas += engine.step()
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, "abort"), (1, "abort")]
    assert "grammar" in str(deltas[0].error)


leaves = st.one_of(
    st.builds(lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
              st.integers(-50, 50), st.integers(0, 100)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda values: {"enum": values},
              st.lists(st.text(max_size=4) | st.integers(-9, 9), min_size=1, max_size=3)),
    st.builds(lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
              st.integers(0, 3), st.integers(0, 5)),
    st.sampled_from([{"type": "string", "pattern": p} for p in (r"^\d{3}-[a-z]{2}$", r"^\w{2}\s\w$", "^(a|bc)+x?$")]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "time", "uuid", "ipv4", "email")]),
    st.just({"const": {"a": [1, "é"]}}),
)  # fmt: skip
names = st.text(alphabet='ab/~é "\\', min_size=1, max_size=4)


def objects(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], optional: bool) -> dict[str, Any]:
        required = list(properties)[: len(properties) - optional]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(names, inner, max_size=3), st.booleans())


def arrays(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    def build(items: dict[str, Any], low: int, span: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + span}

    return st.builds(build, inner, st.integers(0, 2), st.integers(0, 2))


def alternatives(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))


schemas = st.recursive(leaves, lambda inner: objects(inner) | arrays(inner) | alternatives(inner), max_leaves=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schemas, st.integers(0, 2**32))
def test_random_schemas_are_kept(llm: LLM, schema: dict[str, Any], seed: int) -> None:
    params = SamplingParams(seed=seed, max_tokens=300, n=3, structured_outputs=StructuredOutputs(json=schema))
    for output in llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs:
        if output.finish_reason == "stop":
            checker = jsonschema.FormatChecker(["date", "time", "uuid", "ipv4", "email"])
            jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(output.text))
        else:
            assert output.finish_reason == "length"
