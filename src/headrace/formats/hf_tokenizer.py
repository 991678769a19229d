"""Reads the tokenizer of a Hugging Face directory: tokenizer.json, tokenizer_config.json, and the chat templates."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken
from tokenizers.processors import Sequence, TemplateProcessing

from headrace.errors import ModelError
from headrace.formats.files import quoted, read_json_object, read_text
from headrace.formats.tokenizer import Tokenizer, library_faults

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"

MAX_TOKENIZER_BYTES = 512 * 2**20
MAX_SETTINGS_BYTES = 64 * 2**20
MAX_TEMPLATE_BYTES = 2**20

# The usual names; a model may have others of its own.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer that `transformers` would use for this directory.

    One difference: `"add_bos_token": true` is heeded where tokenizer.json itself adds no such token.
    Raises ModelError, naming the file and the fault.
    """
    settings = _settings(directory)
    named = _named_tokens(directory / SETTINGS, settings)
    backend = _backend(directory)
    _add_tokens(backend, directory / SETTINGS, settings, named)
    special_tokens = {name: token.content for name, token in named.items()}
    if settings.get("add_bos_token") is True and "bos_token" in special_tokens:
        _add_bos(backend, special_tokens["bos_token"])
    try:
        return Tokenizer(backend, chat_templates=_chat_templates(directory, settings), special_tokens=special_tokens)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from None


def _settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json on top where it is of the older kind that needs it."""
    settings = _optional_json(directory / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings |= _optional_json(directory / SPECIAL_TOKENS_MAP)
    return settings


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, MAX_SETTINGS_BYTES) if path.exists() else {}


def _backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / TOKENIZER
    if not path.exists():
        raise ModelError(f"{directory}: has no {TOKENIZER}{_other_tokenizer(directory)}")
    text = read_text(path, MAX_TOKENIZER_BYTES, "tokenizer")
    with library_faults(lambda fault: ModelError(f"{path}: is not a tokenizer: {fault}")):
        backend = tokenizers.Tokenizer.from_str(text)
        backend.encode("")  # some faults come to light only in use
    return backend


def _other_tokenizer(directory: Path) -> str:
    for name in ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt"):
        if (directory / name).exists():
            return f", and {name} is not read: let transformers load this tokenizer and save it again"
    return ""


def _named_tokens(path: Path, settings: dict[str, Any]) -> dict[str, AddedToken]:
    """Special tokens that the settings give a name: the usual ones first, then the model's own."""
    extra = settings.get("extra_special_tokens")
    own = [key for key in settings if key.endswith("_token") and key not in NAMES]
    named = {key: settings.get(key) for key in (*NAMES, *own)} | (extra if isinstance(extra, dict) else {})
    return {key: _token(path, value) for key, value in named.items() if isinstance(value, str | dict)}


def _add_tokens(
    backend: tokenizers.Tokenizer, path: Path, settings: dict[str, Any], named: dict[str, AddedToken]
) -> None:
    """Adds what only the settings know; for tokens that tokenizer.json has too, the settings' flags count."""
    decoder = settings.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict) or not all(key.isdecimal() for key in decoder):
        raise ModelError(f"{path}: added_tokens_decoder must map token ids to tokens")
    listed = [_token(path, decoder[key]) for key in sorted(decoder, key=int)]
    contents = {token.content for token in named.values()}
    for token in (*listed, *named.values()):
        token.special |= token.content in contents
    backend.add_tokens(listed)
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = [_token(path, value) for value in extra] if isinstance(extra, list) else []
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in (*named.values(), *extra) if token.content not in present])


def _token(path: Path, value: Any) -> AddedToken:
    """A token from its text (it is special then), or from its text and flags."""
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ModelError(f"{path}: {quoted(value)} is not a token: it must be a string, or an object with content")
    given = {flag: value[flag] for flag in flags if flag in value}
    if not all(isinstance(flag, bool) for flag in given.values()):
        raise ModelError(f"{path}: token {quoted(value['content'])}: {', '.join(given)} must be true or false")
    return AddedToken(value["content"], **given)


def _add_bos(backend: tokenizers.Tokenizer, bos: str) -> None:
    """Lets encoding begin with `bos` if it does not yet."""
    bos_id = backend.token_to_id(bos)
    if backend.encode("").ids[:1] == [bos_id]:
        return
    add = TemplateProcessing(
        single="bos $A", pair="bos $A $B", special_tokens=[{"id": "bos", "ids": [bos_id], "tokens": [bos]}]
    )
    backend.post_processor = Sequence([backend.post_processor, add]) if backend.post_processor else add


def _chat_templates(directory: Path, settings: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name, from the first of the places that has any: files of their own, then the settings.

    `chat_template.json`, which older multi-modal models have, comes last: tokenizers do not look there at all.
    """
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in (directory / "additional_chat_templates").glob("*.jinja")}
    templates = {name: read_text(path, MAX_TEMPLATE_BYTES, "template") for name, path in files.items() if path.exists()}
    if templates:
        return templates
    templates = _templates_in(directory / SETTINGS, settings.get("chat_template"))
    if templates:
        return templates
    path = directory / "chat_template.json"
    return _templates_in(path, _optional_json(path).get("chat_template"))


def _templates_in(path: Path, value: Any) -> dict[str, str]:
    """Templates as a JSON value: one alone, or several with their names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        raise ModelError(f"{path}: chat_template must be a string, or a list of objects with name and template")
    return value
