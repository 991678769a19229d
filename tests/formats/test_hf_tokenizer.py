"""How a directory's tokenizer files are put together, against transformers, and what comes of bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from headrace.errors import ModelError, RequestError
from headrace.formats.hf_tokenizer import load_tokenizer
from helpers.tiny import t0_tokenizer
from helpers.tokenizer_zoo import save

HI = [{"role": "user", "content": "Hi"}]
TEXTS = ["abc", "<s>a</s>", "a <new>b", "a <x> b", "[PAD]", "<extra>", " <new> ", "<NEW>", "<image>"]


def token(content: str, **flags: bool) -> dict[str, Any]:
    defaults = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **defaults, **flags}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no names": {"bos_token": None, "eos_token": None, "pad_token": None},
    "new pad": {"pad_token": "[PAD]"},
    "name as object": {"pad_token": {"__type": "AddedToken", **token("[PAD]", lstrip=True)}},
    "decoder": {"added_tokens_decoder": {"258": token("<pad>"), "256": token("<s>"), "257": token("</s>")}},
    "decoder adds": {"added_tokens_decoder": {"259": token("<new>", special=False), "260": token("<x>")}},
    "decoder changes": {"added_tokens_decoder": {"256": token("<s>", lstrip=True, rstrip=True)}},
    "decoder and name": {"added_tokens_decoder": {"259": token("<new>", special=False)}, "unk_token": "<new>"},
    "extra list": {"extra_special_tokens": ["<extra>", "<x>"]},
    "additional": {"additional_special_tokens": ["<extra>", {"__type": "AddedToken", **token("<x>", normalized=True)}]},
    "extra object": {"extra_special_tokens": {"image_token": "<image>", "boi_token": "<x>"}},
    "own names": {"image_token": "<image>", "add_prefix_space": False},
    "null": {"unk_token": None, "added_tokens_decoder": {}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_from_the_settings(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, t0_tokenizer(), **SETTINGS[name])
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == {i for i, added in theirs.added_tokens_decoder.items() if added.special}
    assert ours.vocab_size == len(theirs)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        ids = theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_the_older_file_of_special_tokens(tmp_path: Path) -> None:
    directory = save(tmp_path, t0_tokenizer(), bos_token=None, pad_token=None, eos_token="<pad>")
    content = {"bos_token": token("<s>"), "eos_token": "</s>", "additional_special_tokens": ["<x>"]}
    (directory / "special_tokens_map.json").write_text(json.dumps(content))
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    assert ours.special_tokens == theirs.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}
    assert ours.encode("<x>") == theirs.encode("<x>") == [259]


def test_a_directory_without_settings(tmp_path: Path) -> None:
    directory = save(tmp_path, t0_tokenizer())
    (directory / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special_tokens == {}
    assert tokenizer.encode("<s>a") == [256, 97]


def test_bos_is_added_where_the_settings_say_so_and_only_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path / "a", t0_tokenizer(), add_bos_token=True))
    assert tokenizer.encode("abc") == [256, 97, 98, 99]
    assert tokenizer.encode("abc", add_special_tokens=False) == [97, 98, 99]
    assert tokenizer.encode_batch(["a", ""]) == [[256, 97], [256]]
    assert load_tokenizer(save(tmp_path / "b", t0_tokenizer(), add_bos_token=False)).encode("abc") == [97, 98, 99]
    assert load_tokenizer(save(tmp_path / "c", t0_tokenizer())).encode("abc") == [97, 98, 99]

    backend = t0_tokenizer()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    assert load_tokenizer(save(tmp_path / "d", backend, add_bos_token=True)).encode("a") == [256, 97]
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 257)])
    assert load_tokenizer(save(tmp_path / "e", backend, add_bos_token=True)).encode("a") == [256, 97, 257]


def put_template(directory: Path, place: str, name: str, source: str) -> None:
    if place == "jinja":
        path = directory / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    elif place == "json":
        (directory / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    else:
        path = directory / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        if place == "settings":
            settings["chat_template"] = source
        else:
            settings["chat_template"] = [*settings.get("chat_template", []), {"name": name, "template": source}]
        path.write_text(json.dumps(settings))


@pytest.mark.parametrize(
    "places",
    [
        [("settings", "default")],
        [("settings list", "default")],
        [("settings list", "default"), ("settings list", "tool_use"), ("settings list", "rag")],
        [("settings list", "tool_use")],
        [("jinja", "default")],
        [("jinja", "default"), ("jinja", "tool_use"), ("jinja", "rag")],
        [("jinja", "tool_use")],
        [("settings", "default"), ("jinja", "default")],
        [("settings list", "default"), ("settings list", "tool_use"), ("jinja", "default")],
        [("settings", "default"), ("jinja", "tool_use")],
        [("settings", "default"), ("json", "default")],
        [("jinja", "default"), ("json", "default")],
        [],
    ],
)
def test_where_chat_templates_are_looked_for(tmp_path: Path, places: list[tuple[str, str]]) -> None:
    directory = save(tmp_path, t0_tokenizer())
    for place, name in places:
        put_template(directory, place, name, f"{place} {name}: {{{{ messages[0].content }}}}")
    ours, theirs = load_tokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for tools in (None, [{"type": "function"}]):
        try:
            expected = theirs.apply_chat_template(HI, tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(RequestError, match="no chat template"):
                ours.render_chat(HI, tools=tools)
        else:
            assert ours.render_chat(HI, tools=tools) == expected


def test_the_third_place_is_the_last(tmp_path: Path) -> None:
    directory = save(tmp_path, t0_tokenizer())
    put_template(directory, "json", "default", "json: {{ messages[0].content }}")
    assert load_tokenizer(directory).render_chat(HI) == "json: Hi"


@pytest.mark.parametrize("value", [5, ["x"], [{"name": "default"}], [{"template": "x"}], {"default": 5}, True])
def test_chat_templates_that_are_none(tmp_path: Path, value: Any) -> None:
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: chat_template must be a string, or a list of objects"
    ):
        load_tokenizer(save(tmp_path, t0_tokenizer(), chat_template=value))


def test_a_broken_template_names_the_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"{tmp_path}: the chat template 'default' does not compile: line 2: "):
        load_tokenizer(save(tmp_path, t0_tokenizer(), chat_template="a\n{% if %}"))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"bos_token": {"lstrip": True}}, r"tokenizer_config\.json: {'lstrip': True} is not a token"),
        ({"added_tokens_decoder": {"256": 5}}, r"tokenizer_config\.json: 5 is not a token"),
        ({"added_tokens_decoder": {"x": token("y")}}, "added_tokens_decoder must map token ids to tokens"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder must map token ids to tokens"),
        ({"extra_special_tokens": [5]}, "5 is not a token"),
        ({"eos_token": token("a") | {"special": "yes"}}, "token 'a': .* must be true or false"),
    ],
)
def test_settings_at_fault(tmp_path: Path, settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        load_tokenizer(save(tmp_path, t0_tokenizer(), **settings))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"),
        (b"{", "is not a tokenizer: "),
        (b"{}", "is not a tokenizer: "),
        (b"[" * 100_000, "is not a tokenizer: "),
        (b'{"version": "1.0", "model": {"type": "Magic"}}', "is not a tokenizer: "),
        (b"\xff", "is not UTF-8 text: invalid start byte at byte 0"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer, not a tokenizer: run git lfs pull"),
    ],
)
def test_tokenizer_files_at_fault(tmp_path: Path, content: bytes, fault: str) -> None:
    (save(tmp_path, t0_tokenizer()) / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"/tokenizer\.json: {fault}"):
        load_tokenizer(tmp_path)


def test_files_on_which_the_library_panics(tmp_path: Path) -> None:
    """With each of them the Rust code beneath gives up: when loading, when encoding, when decoding."""
    path = save(tmp_path, t0_tokenizer()) / "tokenizer.json"
    good = json.loads(path.read_text())

    path.write_text(
        json.dumps(good | {"model": good["model"] | {"continuing_subword_prefix": "##", "merges": [["!", "#"]]}})
    )
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a tokenizer: "):
        load_tokenizer(tmp_path)

    unknown = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "?", "type_id": 0}}], "pair": []}
    path.write_text(json.dumps(good | {"post_processor": unknown | {"special_tokens": {}}}))
    with pytest.raises(ModelError, match=r"tokenizer\.json: is not a tokenizer: "):
        load_tokenizer(tmp_path)

    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 2}
    path.write_text(json.dumps(good | {"decoder": strip}))
    with pytest.raises(RequestError, match="the tokenizer cannot decode these tokens: index out of bounds"):
        load_tokenizer(tmp_path).decode([97])


def test_no_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"^{tmp_path}: has no tokenizer\.json$"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_text("x")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and tokenizer\.model is not read: let transformers"):
        load_tokenizer(tmp_path)
