"""Text token by token, against decoding everything at once with the tokenizers library."""

import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.detokenizer import LONGEST_PREVIEW, Detokenizer
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from helpers import model_files
from helpers.awkward import AWKWARD
from helpers.tokenizer_zoo import ZOO

REAL = {"smollm2": model_files.smollm2, "gemma3": model_files.gemma3}
KINDS = [*ZOO, *REAL]


@cache
def tokenizer_of(kind):
    """The tokenizer, and the library's own that is inside it."""
    if kind in REAL:
        tokenizer = GGUFCheckpoint(REAL[kind]()).tokenizer()
        return tokenizer, tokenizer._backend
    backend = ZOO[kind]()
    return Tokenizer(backend, chat_templates={}, special_tokens={}), backend


def common_start(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def whole_text(backend, prompt, output, skip=True):
    """What `output` adds to the text of `prompt`, by decoding all of both at once."""
    known = [i for i in output if backend.id_to_token(i) is not None]
    both = backend.decode(prompt + known, skip_special_tokens=skip)
    return both[common_start(backend.decode(prompt, skip_special_tokens=skip), both) :]


def pieces_of(tokenizer, prompt, output, **params):
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    return [*map(detokenizer.append, output), detokenizer.finish()], detokenizer.stopped_by


@st.composite
def token_ids(draw, kind, size=24):
    """Ids of any kind: parts of texts, and random ones, among them many of single bytes and special tokens."""
    tokenizer, backend = tokenizer_of(kind)
    rare = sorted(tokenizer.special_ids | tokenizer.byte_ids) or [0]
    pieces = st.one_of(
        st.sampled_from(AWKWARD).map(lambda text: backend.encode(text, add_special_tokens=False).ids[:12]),
        st.lists(st.sampled_from(rare), max_size=6),
        st.lists(st.integers(0, min(tokenizer.vocab_size, 600)), max_size=6),  # short tokens, as halves of characters
        st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=6),  # and some ids without a token
        st.binary(max_size=6).map(lambda data: byte_tokens(backend, data)),
    )
    return [i for piece in draw(st.lists(pieces, max_size=6)) for i in piece][:size]


def byte_tokens(backend, data):
    """Each byte as a token of its own, where the vocabulary has those."""
    names = [[f"<0x{byte:02X}>", byte_level_name(byte)] for byte in data]
    ids = [next((i for name in both if (i := backend.token_to_id(name)) is not None), None) for both in names]
    return [i for i in ids if i is not None]


def byte_level_name(byte):
    """The character for a byte in byte-level vocabularies: the byte's own in Latin-1 if visible, else from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in visible else chr(256 + [b for b in range(256) if b not in visible].index(byte))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_pieces_add_up_to_the_whole_text(kind, data):
    tokenizer, backend = tokenizer_of(kind)
    prompt = [i for i in data.draw(token_ids(kind)) if backend.id_to_token(i) is not None]
    output = data.draw(token_ids(kind, 60))
    skip = data.draw(st.booleans())
    pieces, _ = pieces_of(tokenizer, prompt, output, skip_special_tokens=skip)
    assert "".join(pieces) == whole_text(backend, prompt, output, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_texts_come_out_as_they_went_in(kind):
    """Every text, cut into prompt and output at several places: the stream is the text, and never half a character."""
    tokenizer, backend = tokenizer_of(kind)
    start = backend.encode("a", add_special_tokens=False).ids  # so that the text is not at the very beginning
    for text in AWKWARD:
        ids = backend.encode(text, add_special_tokens=False).ids
        for cut in {0, len(ids) // 3, len(ids) - 1} if ids else ():
            pieces, _ = pieces_of(tokenizer, start + ids[:cut], ids[cut:])
            whole = whole_text(backend, start + ids[:cut], ids[cut:])
            assert "".join(pieces) == whole
            if "\ufffd" not in whole:
                assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["gpt2", "smollm2", "gemma3"])
def test_text_is_not_held_back_longer_than_needed(kind):
    tokenizer, backend = tokenizer_of(kind)
    prompt, text = backend.encode("Well,", add_special_tokens=False).ids, " the dog 🙂 does not mind."
    ids = backend.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams())
    given_out = ""
    for i, token in enumerate(ids):
        given_out += detokenizer.append(token)
        # Each step ends at the last whole character, which is where the bytes so far decode to a beginning of the text.
        settled = whole_text(backend, prompt, ids[: i + 1]).rstrip("\ufffd")
        assert given_out == settled
    assert given_out == text
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["smollm2", "gemma3"])
def test_the_first_piece_begins_with_the_space_of_its_token(kind):
    tokenizer, backend = tokenizer_of(kind)
    prompt = backend.encode("The capital of France is").ids
    output = backend.encode(" Paris, which", add_special_tokens=False).ids
    pieces, _ = pieces_of(tokenizer, prompt, output)
    assert pieces == [*map(tokenizer.token_text, output), ""]
    assert "".join(pieces) == " Paris, which"


def test_only_a_text_of_its_own_loses_its_first_space():
    """SentencePiece puts a space before each text, and takes it away: from the first word of all, not of the output."""
    tokenizer, backend = tokenizer_of("llama2")
    the, dog = (backend.encode(word, add_special_tokens=False).ids for word in ("the", "dog"))
    assert "".join(pieces_of(tokenizer, [], the + dog)[0]) == "the dog"
    assert "".join(pieces_of(tokenizer, the, dog)[0]) == " dog"
    assert "".join(pieces_of(tokenizer, [*the, backend.token_to_id("</s>")], dog)[0]) == " dog"


def test_a_character_that_the_prompt_began_comes_out_whole():
    for kind in ("gpt2", "llama2"):
        tokenizer, backend = tokenizer_of(kind)
        smile = byte_tokens(backend, "🙂".encode())
        x = backend.encode("x", add_special_tokens=False).ids
        for cut in range(4):
            pieces, _ = pieces_of(tokenizer, x + smile[:cut], smile[cut:] + x)
            assert "".join(pieces) == "🙂" + backend.decode(x + x)[1:]
        # And if the output does not complete it, its U+FFFD is the prompt's.
        assert "".join(pieces_of(tokenizer, x + smile[:2], x)[0]) == backend.decode(x + x)[1:]


def test_incomplete_bytes_are_flushed_at_the_end():
    for kind, marks in (("gpt2", 1), ("llama2", 3)):  # the library shows such bytes together or one by one
        tokenizer, backend = tokenizer_of(kind)
        x = backend.encode("x", add_special_tokens=False).ids
        detokenizer = Detokenizer(tokenizer, x, SamplingParams())
        for token in byte_tokens(backend, "🙂".encode()[:3]):
            assert detokenizer.append(token) == ""
        assert detokenizer.finish() == "\ufffd" * marks


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_text_only_if_not_skipped(skip):
    tokenizer, backend = tokenizer_of("byte_level")
    end = backend.token_to_id("<|im_end|>")
    x = backend.encode("x", add_special_tokens=False).ids
    smile = byte_tokens(backend, "🙂".encode())
    output = [end, *x, *smile[:2], end, *smile[2:], *[end] * 40, *x]
    pieces, _ = pieces_of(tokenizer, x, output, skip_special_tokens=skip)
    tag = "<|im_end|>"
    assert "".join(pieces) == ("x🙂x" if skip else f"{tag}x\ufffd{tag}\ufffd\ufffd{tag * 40}x")


# Stop strings


def longest_held(text, stops):
    """How much of the end of a text could be the beginning of a stop string."""
    ends = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(ends, default=0)


def stopped_text(backend, prompt, output, stops, min_tokens, include):
    """The text as cut, the stop string, and what is given out by when: straight from the definition, slowly."""
    byte_ids = {i for i in range(backend.get_vocab_size()) if backend.id_to_token(i).startswith("<0x")}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    settled, given_out = "", []
    for count in range(1, len(output) + 2):
        if count == len(output) + 1:  # the end
            certain = preview = whole_text(backend, prompt, output)
            count -= 1
        else:
            tokens = [i for i in output[:count] if i not in special]  # which do not end a row of byte tokens
            row = next((n for n, i in enumerate(reversed(tokens)) if i not in byte_ids), len(tokens))
            preview = whole_text(backend, prompt, tokens)
            if row == 0:
                certain = preview = preview.removesuffix("\ufffd")
            else:
                certain = whole_text(backend, prompt, tokens[:-row]).removesuffix("\ufffd")
                preview = certain if "\ufffd" in preview[len(certain) :] else preview
        if count > min_tokens:
            for end in range(len(settled) + 1, len(preview) + 1):
                ending = [stop for stop in stops if preview[:end].endswith(stop)]
                if ending:
                    stop = max(ending, key=len)
                    return preview[: end if include else end - len(stop)], stop, given_out
        settled = certain
        given_out.append(settled if include else settled[: len(settled) - longest_held(settled, stops)])
    return settled, None, given_out[:-1]


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "gemma"])
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_stop_strings(kind, data):
    tokenizer, backend = tokenizer_of(kind)
    start = backend.encode("x", add_special_tokens=False).ids
    alphabet = [i for text in ("a", "b", "ab", "aa", " a", "é", "🙂") for i in backend.encode(text).ids]
    alphabet = [i for i in dict.fromkeys(alphabet) if i not in tokenizer.special_ids]
    output = data.draw(st.lists(st.sampled_from(alphabet), max_size=30) | token_ids(kind, 30))
    output = [i for i in output if backend.id_to_token(i) is not None]
    text = whole_text(backend, start, output).replace("\ufffd", "")
    parts = st.integers(0, max(0, len(text) - 1)).flatmap(lambda i: st.integers(1, 6).map(lambda n: text[i : i + n]))
    strings = st.text("ab é🙂", min_size=1, max_size=5) | parts.filter(bool)
    stops = data.draw(st.lists(strings, min_size=1, max_size=4))
    min_tokens = data.draw(st.sampled_from([0, 0, 1, 3, 10]))
    include = data.draw(st.booleans())

    wanted, found, given_out = stopped_text(backend, start, output, stops, min_tokens, include)
    pieces, stopped_by = pieces_of(
        tokenizer, start, output, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include
    )
    assert "".join(pieces) == wanted
    assert stopped_by == found
    for i, so_far in enumerate(given_out):
        assert "".join(pieces[: i + 1]) == so_far


def stream(kind, text, **params):
    """Pieces for the tokens of a text, one per character of it."""
    tokenizer, backend = tokenizer_of(kind)
    ids = [i for character in text for i in backend.encode(character, add_special_tokens=False).ids]
    return pieces_of(tokenizer, backend.encode("x", add_special_tokens=False).ids, ids, **params)


def test_the_stop_string_that_is_complete_first_wins():
    assert stream("gpt2", "abcd", stop=["abcd", "bc"]) == (["", "", "a", "", ""], "bc")
    assert stream("gpt2", "abcd", stop=["bc", "abc"]) == (["", "", "", "", ""], "abc")
    assert stream("gpt2", "abcd", stop=["d", "c"])[1] == "c"
    assert stream("gpt2", "abcd", stop="bc", include_stop_str_in_output=True) == (["a", "b", "c", "", ""], "bc")


def test_text_after_a_stop_string_in_the_same_token_is_dropped():
    tokenizer, backend = tokenizer_of("smollm2")
    (token,) = backend.encode(" capital", add_special_tokens=False).ids
    assert pieces_of(tokenizer, [], [token], stop="pi") == ([" ca", ""], "pi")
    assert pieces_of(tokenizer, [], [token], stop="pi", include_stop_str_in_output=True) == ([" capi", ""], "pi")


def test_what_was_held_back_is_delivered_at_the_end():
    assert stream("gpt2", "never mind", stop="mind you") == ([*"never ", "", "", "", "", "mind"], None)


def test_stop_strings_within_the_first_tokens_do_not_count():
    assert stream("gpt2", "aXbXc", stop="X", min_tokens=1) == (["a", "", "", "", "", ""], "X")
    assert stream("gpt2", "aXbXc", stop="X", min_tokens=2) == (["a", "X", "b", "", "", ""], "X")
    assert stream("gpt2", "aXbXc", stop="X", min_tokens=5)[1] is None
    # Begun within them and complete after them.
    assert stream("gpt2", "aXYb", stop="XY", min_tokens=2) == (["a", "", "", "", ""], "XY")


def test_a_stop_string_of_byte_tokens_is_found_with_its_last_byte():
    """Though the text of byte tokens is certain only with the token after them."""
    tokenizer, backend = tokenizer_of("llama2")
    x, smile = backend.encode("x", add_special_tokens=False).ids, byte_tokens(backend, "\t🙂".encode())
    detokenizer = Detokenizer(tokenizer, x, SamplingParams(stop="🙂"))
    assert [detokenizer.append(i) for i in smile] == ["", "", "", "", "\t"]
    assert detokenizer.stopped_by == "🙂"
    # In a very long row it is found where the row ends.
    long_row = byte_tokens(backend, b"\t" * LONGEST_PREVIEW) + smile
    detokenizer = Detokenizer(tokenizer, x, SamplingParams(stop="🙂"))
    assert "".join(map(detokenizer.append, long_row)) == ""
    assert detokenizer.finish() == "\t" * (LONGEST_PREVIEW + 1)
    assert detokenizer.stopped_by == "🙂"


def test_stopping_is_linear_in_the_text():
    """Strings that make searching over and over, or from the start each time, take for ever."""
    n = MAX_STOP_LENGTH
    stops = ["a" * (n - 1) + chr(ord("b") + i) for i in range(MAX_STOP_STRINGS - 1)] + ["ab" * (n // 2 - 1) + "c"]
    tokenizer, backend = tokenizer_of("gpt2")
    a, b = (backend.encode(character, add_special_tokens=False).ids for character in "ab")
    start = time.process_time()
    detokenizer = Detokenizer(tokenizer, a, SamplingParams(stop=stops))
    text = "".join(map(detokenizer.append, a * 5999)) + "".join(map(detokenizer.append, (a + b) * 2000))
    text += detokenizer.finish()
    assert text == "a" * (6000 - (n - 1))  # there the string of n - 1 times a and b is complete
    assert detokenizer.stopped_by == stops[0]
    assert time.process_time() - start < 3  # 8000 tokens: a third of a second; a quadratic search takes minutes


@pytest.mark.parametrize("kind", ["smollm2", "gemma3"])
def test_the_cost_of_a_token_does_not_grow(kind):
    tokenizer, backend = tokenizer_of(kind)
    ids = backend.encode(" ".join(AWKWARD), add_special_tokens=False).ids[:4000]
    invalid = byte_tokens(backend, b"\x80") * 4000
    for output in (ids, invalid):
        detokenizer = Detokenizer(tokenizer, ids[:10], SamplingParams(stop=["never", "occurs"]))
        start = time.process_time()
        for token in output:
            detokenizer.append(token)
        per_token = (time.process_time() - start) / len(output)
        assert per_token < 300e-6  # about 15 microseconds on a quiet machine
