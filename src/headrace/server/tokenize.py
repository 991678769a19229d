"""`/tokenize` and `/detokenize`, as vLLM has them: what a prompt or a chat is in tokens, and the way back."""

from typing import TYPE_CHECKING, Any

from headrace.errors import RequestError
from headrace.server.config import ServerConfig
from headrace.server.dialect import dialect_of
from headrace.server.logprobs import token_name
from headrace.server.protocol import DetokenizeBody, TokenizeBody, TokenizeChatBody, parse_body, parse_json
from headrace.server.translate import chat_prompt, check_model

if TYPE_CHECKING:
    from headrace.engine.async_engine import AsyncEngine


def tokenized(engine: "AsyncEngine", names: list[str], raw: bytes, config: ServerConfig) -> dict[str, Any]:
    """The answer of `/tokenize`. Raises ApiError or RequestError. Blocks: it tokenizes."""
    document = parse_json(raw)
    body: TokenizeBody | TokenizeChatBody
    if isinstance(document, dict) and "messages" in document:
        body = parse_body(TokenizeChatBody, raw)
        dialect = dialect_of(engine.tokenizer, config.tool_call_parser, config.reasoning_parser)
        ids = chat_prompt(engine, body, dialect)
    else:
        body = parse_body(TokenizeBody, raw)
        ids = engine.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    if body.model is not None:
        check_model(body.model, names)
    strings = [token_name(engine.tokenizer, token)[0] for token in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings}


def detokenized(engine: "AsyncEngine", names: list[str], raw: bytes) -> dict[str, Any]:
    """The answer of `/detokenize`: the text, special tokens included."""
    body = parse_body(DetokenizeBody, raw)
    if body.model is not None:
        check_model(body.model, names)
    for token in body.tokens:
        if not 0 <= token < engine.vocab_size:
            raise RequestError(f"tokens: {token} is no token id; they go from 0 to {engine.vocab_size - 1}", "tokens")
    known = [token for token in body.tokens if token < engine.tokenizer.vocab_size]  # a model may have more rows
    return {"prompt": engine.tokenizer.decode(known, skip_special_tokens=False)}
