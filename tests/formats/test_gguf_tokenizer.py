"""Tokenizers out of GGUF files, against transformers' reading of the same file and the sentencepiece package."""

import io
import json
import random
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from gguf import GGUFWriter
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from headrace.errors import ModelError, RequestError
from headrace.formats import gguf_tokenizer
from headrace.formats.gguf import GGUFFile
from headrace.formats.gguf_checkpoint import GGUFCheckpoint
from headrace.formats.gguf_tokenizer import GGUFVocabulary
from helpers import model_files
from helpers.awkward import AWKWARD, CODE, EMOJI, SCRIPTS, WORDS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
CORPUS = [*CODE, *EMOJI, *SCRIPTS, *WORDS, "aaa aaaa aaaaa ababab", "The quick brown fox jumps over the lazy dog."] * 4
GEMMA_TEXTS = [
    "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
    "a<end_of_turn>b <eos> <pad><unused5>",
    "<table><tr><td>1</td></tr></table> [multimodal]<start_of_image>",
    "a\n\n\nb\t\tc  \u2581 d\u2581\u2581e",
]


def random_texts(pieces: Sequence[str], count: int) -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices(pieces, k=rng.randint(1, 40))) for _ in range(count)]


def write_tokenizer(
    path: Path,
    kind: str,
    tokens: list[str],
    types: list[int],
    *,
    pre: str | None = None,
    merges: list[str] | None = None,
    scores: list[float] | None = None,
    **metadata: bool | int,
) -> GGUFFile:
    """A file with a tokenizer and nothing else; `metadata` is what goes under `tokenizer.ggml`."""
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    for key, value in metadata.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GGUFFile(path)


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    return gguf_tokenizer.build_tokenizer(GGUFVocabulary(file))


def transformers_tokenizer(path: Path, cls: Any = transformers.PreTrainedTokenizerFast) -> Any:
    """transformers' tokenizer of a file; AutoTokenizer would do, but takes a minute over a large one."""
    return cls.from_pretrained(path.parent, gguf_file=path.name)


def assert_same(texts: Sequence[str], found: Tokenizer, encode: Callable[[str], list[int]], reference: Any) -> None:
    """The same ids, and the same text out of them."""
    for text in texts:
        ids = encode(text)
        assert found.encode(text).ids == ids, repr(text)
        expected = reference.decode(ids, clean_up_tokenization_spaces=False)
        assert found.decode(ids, skip_special_tokens=False) == expected, repr(text)


# The two real models


@cache
def smollm2() -> Tokenizer:
    return build_tokenizer(GGUFFile(model_files.smollm2()))


@cache
def gemma3() -> Tokenizer:
    return build_tokenizer(GGUFFile(model_files.gemma3()))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("12345", [33, 34, 35, 36, 37]),
        ("3.14159", [35, 30, 33, 36, 33, 37, 41]),
        ("In 2024 we had 1,234.50", 17),
        ("don't", [12420, 982]),
        ("foo_bar", [15236, 79, 6299]),
        ("   ", [333]),
        ("\n\n\n", [16506]),
        ("x = y**2\n\treturn", [104, 446, 329, 828, 34, 198, 197, 5406]),
        ("a" * 64, [46880] * 16),
        (" word" * 100, 100),
        ("🙂", [10813, 38887]),
        ("🫠", [10813, 121, 250]),
        ("🔥", [10813, 238, 115]),
        ("A<|im_end|>B", 3),
    ],
)
def test_smollm2_splits_as_in_training(text: str, ids: list[int] | int) -> None:
    found = smollm2().encode(text).ids
    assert len(found) == ids if isinstance(ids, int) else found == ids


def test_smollm2_against_transformers() -> None:
    """transformers lacks the rule that `smollm` names, so each digit goes to it as a text of its own."""
    reference = transformers_tokenizer(model_files.smollm2())

    def encode(text: str) -> list[int]:
        pieces, start = [], 0
        for at, character in enumerate(text):
            if unicodedata.category(character).startswith("N"):
                pieces += [text[start:at], character]
                start = at + 1
        pieces.append(text[start:])
        return [token for piece in pieces if piece for token in reference(piece).input_ids]

    texts = AWKWARD + random_texts([*"aabe \n\t1.é中🙂<|>_'’", "  ", "<|im_end|>", "½", "the"], 200)
    assert len(texts) >= 300
    assert_same(texts, smollm2(), encode, reference)


def test_gemma3_against_transformers() -> None:
    """But for long runs: Gemma's makers defined tokens of up to 31 equal spaces, which transformers merges itself."""
    reference = transformers_tokenizer(model_files.gemma3(), transformers.GemmaTokenizer)
    texts = [text for text in AWKWARD + GEMMA_TEXTS if " " * 32 not in text]
    assert len(texts) >= 300
    assert_same(texts, gemma3(), lambda text: reference(text).input_ids, reference)


def test_gemma3_against_sentencepiece() -> None:
    vocabulary = GGUFVocabulary(GGUFFile(model_files.gemma3()))
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = model.trainer_spec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.add_dummy_prefix = False
    model.normalizer_spec.remove_extra_whitespaces = False
    for text, score, kind in zip(vocabulary.tokens, vocabulary.scores(), vocabulary.types, strict=True):
        defined = text.replace(" ", "\u2581") if kind == USER_DEFINED else text
        model.pieces.add(piece=defined, score=float(score), type=UNKNOWN if text == "<unk>" else int(kind))
    reference = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())

    alphabet = [*"aabe \n\t1.é中🙂<|>_'\"\\{}", "  ", " " * 20, "the", "\u2581", "<table>", "self", "ing", "ह", "ا"]
    found = gemma3()
    for text in AWKWARD + random_texts(alphabet, 1000):
        plain = text.replace("<", "< ")  # sentencepiece takes no control tokens from a text
        assert found.encode(plain, add_special_tokens=False).ids == reference.encode(plain), repr(plain)


def test_ends_and_special_tokens_of_the_real_models() -> None:
    assert GGUFCheckpoint(model_files.smollm2()).generation_config == {"eos_token_id": [2, 0], "bos_token_id": 1}
    assert GGUFCheckpoint(model_files.gemma3()).generation_config == {"eos_token_id": [1, 106], "bos_token_id": 2}
    tokenizer = GGUFCheckpoint(model_files.smollm2()).tokenizer()
    named = {"bos": "<|im_start|>", "eos": "<|im_end|>", "unk": "<|endoftext|>", "pad": "<|im_end|>"}
    assert tokenizer.special_tokens == {f"{name}_token": text for name, text in named.items()}
    assert 2 in tokenizer.special_ids
    assert len(tokenizer.encode_chat([{"role": "user", "content": "Hi"}])) == 31  # the file's template is in use
    with pytest.raises(RequestError):
        tokenizer.encode("half \ud83d of a character")


# Byte-level BPE


def byte_level_metadata(path: Path, **metadata: Any) -> GGUFFile:
    """A vocabulary trained in a moment, with four control tokens and a defined one at the end."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator([*CORPUS, "1234567890 2024 12345"], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return write_tokenizer(
        path,
        "gpt2",
        [*tokens, "<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<tool>"],
        [NORMAL] * len(tokens) + [CONTROL] * 4 + [USER_DEFINED],
        merges=[" ".join(merge) for merge in model["merges"]],
        **({"bos_token_id": len(tokens), "eos_token_id": len(tokens) + 1} | metadata),
    )


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "llama-v3", "qwen2"])
def test_pre_tokenizers_against_transformers(tmp_path: Path, pre: str) -> None:
    file = byte_level_metadata(tmp_path / "model.gguf", pre=pre, add_bos_token=False)
    reference = transformers_tokenizer(file.path)

    def encode(text: str) -> list[int]:
        # Qwen 2's own tokenizer composes characters; transformers leaves that out for GGUF files.
        return reference(unicodedata.normalize("NFC", text) if pre == "qwen2" else text).input_ids

    texts = AWKWARD + random_texts([*"abe \n\t1.é'<", "'ll", "'RE", "123", "e\u0301", "<tool>"], 100)
    assert_same(texts, build_tokenizer(file), encode, reference)


def test_llama_bpe_takes_known_words_whole(tmp_path: Path) -> None:
    """Llama 3 has words that its merges cannot reach."""
    tokens, types = ["a", "b", "c", "ab", "abc", "bc"], [NORMAL] * 6
    whole = write_tokenizer(tmp_path / "a.gguf", "gpt2", tokens, types, pre="llama-bpe", merges=["a b"])
    assert build_tokenizer(whole).encode("abc").ids == [4]
    merged = write_tokenizer(tmp_path / "b.gguf", "gpt2", tokens, types, pre="gpt-2", merges=["a b"])
    assert build_tokenizer(merged).encode("abc").ids == [3, 2]


def test_unknown_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    file = byte_level_metadata(tmp_path / "model.gguf", pre="deepseek-llm")
    with pytest.raises(ModelError, match=r"model\.gguf: .*'deepseek-llm'.*gpt-2, llama-bpe, .*smollm, qwen2"):
        build_tokenizer(file)


@pytest.mark.parametrize("pre", [None, "default"])
def test_no_pre_tokenizer_is_that_of_gpt2_with_a_warning(
    tmp_path: Path, pre: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = build_tokenizer(byte_level_metadata(tmp_path / "a.gguf", pre=pre))
    assert "does not name a pre-tokenizer" in caplog.text
    named = build_tokenizer(byte_level_metadata(tmp_path / "b.gguf", pre="gpt-2"))
    assert [found.encode(text).ids for text in AWKWARD] == [named.encode(text).ids for text in AWKWARD]


@pytest.mark.parametrize(
    ("pre", "told", "added"),
    [
        ("gpt-2", {}, ""),
        ("llama-bpe", {}, "bos"),  # llama.cpp's rule for files that do not say
        ("llama-bpe", {"add_bos_token": False}, ""),
        ("gpt-2", {"add_bos_token": True}, "bos"),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, "bos eos"),
        ("gpt-2", {"add_eos_token": True}, "eos"),
    ],
)
def test_ends_are_added_as_the_file_says(tmp_path: Path, pre: str, told: dict[str, bool], added: str) -> None:
    file = byte_level_metadata(tmp_path / "model.gguf", pre=pre, **told)
    tokenizer = build_tokenizer(file)
    plain = tokenizer.encode("Hello", add_special_tokens=False).ids
    bos, eos = (file.metadata[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos"))
    expected = [bos] * ("bos" in added) + plain + [eos] * ("eos" in added)
    assert tokenizer.encode("Hello").ids == expected
    assert tokenizer.decode(expected) == "Hello"


def test_kinds_of_tokens(tmp_path: Path) -> None:
    file = byte_level_metadata(tmp_path / "model.gguf", pre="gpt-2")
    tokenizer = build_tokenizer(file)
    control, defined = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<tool>")
    assert file.strings("tokenizer.ggml.tokens")[defined] == "<tool>"
    assert tokenizer.encode("a<|im_end|>b<tool>c").ids.count(control) == 1
    assert tokenizer.decode([control, defined]) == "<tool>"
    tokenizer.encode_special_tokens = True  # control tokens are plain text then; defined ones are still found
    ids = tokenizer.encode("a<|im_end|>b<tool>c").ids
    assert control not in ids
    assert defined in ids


# SentencePiece


@cache
def trained_sentencepiece(dummy_prefix: bool) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=dummy_prefix,
        split_by_whitespace=dummy_prefix,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=[] if dummy_prefix else ["<think>", "\u2581\u2581\u2581", "\n\n"],
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_against_a_trained_sentencepiece_model(tmp_path: Path, dummy_prefix: bool) -> None:
    trained = trained_sentencepiece(dummy_prefix)
    reference = sentencepiece.SentencePieceProcessor(model_proto=trained)
    pieces = sentencepiece_model_pb2.ModelProto.FromString(trained).pieces
    file = write_tokenizer(
        tmp_path / "model.gguf",
        "llama",
        # llama.cpp's converter writes the spaces of defined tokens as spaces
        [piece.piece.replace("\u2581", " ") if piece.type == USER_DEFINED else piece.piece for piece in pieces],
        [piece.type for piece in pieces],
        scores=[piece.score for piece in pieces],
        unknown_token_id=reference.unk_id(),
        bos_token_id=reference.bos_id(),
        eos_token_id=reference.eos_id(),
        add_space_prefix=dummy_prefix,
    )
    tokenizer = build_tokenizer(file)
    tokenizer.encode_special_tokens = True  # as sentencepiece, which takes no control tokens from a text
    for text in AWKWARD + random_texts([*"aaab es\n_().<é中🙂", "   ", "self", "\u2581", "<think>"], 3000):
        ids = reference.encode(text)
        assert tokenizer.encode(text).ids == [reference.bos_id(), *ids], repr(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids), repr(text)


def test_characters_without_bytes_become_the_unknown_token(tmp_path: Path) -> None:
    tokens, types = ["<unk>", "\u2581", "a", "\u2581a"], [UNKNOWN, NORMAL, NORMAL, NORMAL]
    scores = [0.0, -1.0, -2.0, -0.5]
    file = write_tokenizer(tmp_path / "a.gguf", "llama", tokens, types, scores=scores, unknown_token_id=0)
    assert build_tokenizer(file).encode("a中文a").ids == [3, 0, 2]
    file = write_tokenizer(tmp_path / "b.gguf", "llama", tokens, types, scores=scores)  # known by its type
    assert build_tokenizer(file).encode("a中文a").ids == [3, 0, 2]
    file = write_tokenizer(tmp_path / "c.gguf", "llama", tokens, [CONTROL, *types[1:]], scores=scores)
    with pytest.raises(ModelError, match=r"0 of 256 byte tokens, and no unknown token"):
        build_tokenizer(file)


def test_control_tokens_cannot_be_spelled(tmp_path: Path) -> None:
    """Merging must not lead to a control token, where its text is meant as text."""
    tokens = ["<unk>", "<", "s", ">", "<s", "<s>", "\u2581"]
    types = [UNKNOWN, NORMAL, NORMAL, NORMAL, NORMAL, CONTROL, NORMAL]
    file = write_tokenizer(
        tmp_path / "model.gguf",
        "llama",
        tokens,
        types,
        scores=[0.0] * len(tokens),
        unknown_token_id=0,
        add_space_prefix=False,
    )
    tokenizer = build_tokenizer(file)
    assert tokenizer.encode("<s>").ids == [5]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>").ids == [4, 3]


# Faulty files


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "bert"}, "tokenizer of the kind 'bert'; supported are gpt2, llama"),
        ({"tokens": ["a", "b", "a"]}, "'a' twice, as token 0 and as token 2"),
        ({"types": [NORMAL]}, "token_type must have a value for each of the 3 tokens, not 1"),
        ({"merges": ["a z"]}, "do not fit together"),
        ({"merges": ["ab"]}, "do not fit together"),
        ({"kind": "llama"}, "scores must have a value for each of the 3 tokens, not 0"),
        ({"kind": "llama", "scores": [0.0, float("nan"), 0.0]}, "scores has values that are not numbers"),
        ({"kind": "llama", "scores": [0.0] * 3, "tokens": ["a", "b", "a" * 10_000]}, "tokens are implausibly long"),
        ({"add_bos_token": 1}, "add_bos_token must be of type bool, not 1"),
        ({"bos_token_id": True}, "bos_token_id must be of type int, not True"),
    ],
)
def test_faults_are_named(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    valid = {"kind": "gpt2", "tokens": ["a", "b", "ab"], "types": [NORMAL] * 3, "pre": "gpt-2", "merges": ["a b"]}
    if settings.get("kind") == "llama":
        valid["unknown_token_id"] = 0
    with pytest.raises(ModelError, match=message) as error:
        build_tokenizer(write_tokenizer(tmp_path / "model.gguf", **(valid | settings)))
    assert str(error.value).startswith(f"{tmp_path / 'model.gguf'}: ")
    assert "\n" not in str(error.value)


def test_a_special_id_outside_the_vocabulary_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As files write -1 for none, into an unsigned number."""
    file = write_tokenizer(
        tmp_path / "model.gguf", "gpt2", ["a", "b"], [NORMAL] * 2, pre="gpt-2", merges=[], eos_token_id=2**32 - 1
    )
    assert GGUFVocabulary(file).special_ids == {}
    assert "eos_token_id" in caplog.text


def test_end_tokens(tmp_path: Path) -> None:
    """Those that the metadata names, and control tokens known by their text; a normal token is none."""
    tokens = ["a", "</s>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|other|>"]
    types = [NORMAL, CONTROL, CONTROL, CONTROL, NORMAL, CONTROL, CONTROL]
    file = write_tokenizer(
        tmp_path / "model.gguf", "gpt2", tokens, types, pre="gpt-2", eos_token_id=1, eot_token_id=6, eom_token_id=3
    )
    assert GGUFVocabulary(file).end_ids() == [1, 6, 3, 2, 5]
