"""The tokenizer wrapper against transformers, on awkward strings."""

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from headrace.errors import RequestError
from headrace.formats.hf_tokenizer import load_tokenizer
from headrace.formats.tokenizer import Tokenizer
from helpers.awkward import AWKWARD
from helpers.tokenizer_zoo import ZOO, save

Pair = tuple[Tokenizer, PreTrainedTokenizerFast]


@pytest.fixture(scope="module", params=ZOO)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    directory = save(tmp_path_factory.mktemp(request.param), ZOO[request.param]())
    return load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save(tmp_path_factory.mktemp("byte_level"), ZOO["byte_level"]()))


def test_there_are_enough_awkward_strings() -> None:
    assert len(AWKWARD) >= 300


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_same_ids_as_transformers(pair: Pair, add_special_tokens: bool) -> None:
    ours, theirs = pair
    for text in AWKWARD:
        expected = theirs.encode(text, add_special_tokens=add_special_tokens)
        assert ours.encode(text, add_special_tokens) == expected, repr(text)
    batch = theirs(AWKWARD, add_special_tokens=add_special_tokens)["input_ids"]
    assert ours.encode_batch(AWKWARD, add_special_tokens) == batch


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_same_text_as_transformers(pair: Pair, skip_special_tokens: bool) -> None:
    ours, theirs = pair
    for text in AWKWARD:
        ids = theirs.encode(text)
        expected = theirs.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens) == expected, repr(text)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("<|>s/ \n"), max_size=30))
def test_same_ids_as_transformers_on_random_text(pair: Pair, text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_vocabulary_and_special_ids(pair: Pair) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.special_tokens == theirs.special_tokens_map


def test_tokens_join_up_to_the_text_as_it_reads_after_another(pair: Pair) -> None:
    ours, theirs = pair
    for text in AWKWARD:
        ids = theirs.encode(text, add_special_tokens=False)
        if ours.special_ids.isdisjoint(ids):
            anchor = theirs.encode("a", add_special_tokens=False)
            after_another = theirs.decode([*anchor, *ids], clean_up_tokenization_spaces=False)
            joined = b"".join(ours.token_bytes(i) or b"" for i in ids)
            assert "a" + joined.decode(errors="replace") == after_another, repr(text)


def test_text_of_single_tokens(pair: Pair) -> None:
    ours, _ = pair
    ids = ours.encode("a the dog</s>", add_special_tokens=False)
    texts = [ours.token_text(i) for i in ids]
    assert "".join(texts).strip() == "a the dog</s>"
    assert any(text.startswith(" ") for text in texts[1:])
    end = ours.encode("</s>", add_special_tokens=False)[-1]
    assert (ours.token_text(end), ours.token_bytes(end)) == ("</s>", None)


def test_half_a_character_has_its_bytes(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🦆", add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(i) or b"" for i in ids) == "🦆".encode()
    assert len(ids) > 1
    assert "\ufffd" in byte_level.token_text(ids[-1])


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "ok \ud83d then", "🙂\udc00"])
def test_lone_surrogates_are_refused(byte_level: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair, at character") as error:
        byte_level.encode(text)
    assert error.value.param == "prompt"
    with pytest.raises(RequestError):
        byte_level.encode_batch(["fine", text])


@pytest.mark.parametrize("text", [None, 5, b"bytes", ["a"], True])
def test_what_is_not_text_is_refused(byte_level: Tokenizer, text: object) -> None:
    with pytest.raises(RequestError, match="prompt must be text"):
        byte_level.encode(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**64, 1.5, "a", None])
def test_what_is_not_a_token_id_is_refused(byte_level: Tokenizer, token: object) -> None:
    with pytest.raises(RequestError, match="is not a token id"):
        byte_level.decode([0, token])  # type: ignore[list-item]


def test_the_first_id_past_the_vocabulary_is_refused(byte_level: Tokenizer) -> None:
    assert byte_level.decode([byte_level.vocab_size - 1])
    with pytest.raises(RequestError, match=f"from 0 to {byte_level.vocab_size - 1}"):
        byte_level.decode([byte_level.vocab_size])
    # A model may have rows past it, and logprobs may name them.
    assert byte_level.token_text(byte_level.vocab_size) == ""
    assert byte_level.token_bytes(byte_level.vocab_size) == b""


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = ZOO["gpt2"]()
    whole = len(backend.encode("a b c d e f g h").ids)
    backend.enable_truncation(3)
    backend.enable_padding(length=64)
    assert len(load_tokenizer(save(tmp_path, backend)).encode("a b c d e f g h")) == whole


def test_a_second_bos_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(save(tmp_path, ZOO["byte_level"]()))
    bos = tokenizer.encode("")[0]
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("abc")[:2].count(bos) == 1
        assert not caplog.records
        assert tokenizer.encode("<s>abc")[:2] == [bos, bos]
        tokenizer.encode("<s>abc")
    assert [record.getMessage() for record in caplog.records] == [
        "a prompt begins with <s>, and the tokenizer has added another"
    ]
