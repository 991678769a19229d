"""Grammars over all kinds of vocabularies: what the masks allow decodes to a text that fits."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from headrace.engine.detokenizer import Detokenizer
from headrace.formats.tokenizer import Tokenizer
from headrace.sampling.params import SamplingParams, StructuredOutputs
from headrace.structured.constraint import Constraint
from headrace.structured.grammars import Grammars
from helpers import tokenizer_zoo as zoo

SCHEMA = {
    "type": "object",
    "properties": {
        "the dog": {"enum": ["brown fox", "é🙂", "x y"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["the dog", "n"],
    "additionalProperties": False,
}
KINDS = [zoo.byte_level, zoo.gpt2, zoo.llama2, zoo.metaspace_first, zoo.gemma]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_what_is_allowed_decodes_to_what_fits(make: Any) -> None:
    tokenizer = Tokenizer(make(), chat_templates={}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    end = tokenizer.special_id("</s>")
    assert end is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 3, [end])
    rng = np.random.default_rng(0)
    prompt = tokenizer.encode("The quick brown fox")
    pattern = r"(brown|é🙂) [a-z ]{1,5}"
    for spec in (StructuredOutputs(json=SCHEMA), StructuredOutputs(regex=pattern)):
        beginning = grammars.compile(spec).result()
        for _ in range(8):
            constraint, text = Constraint(beginning), ""
            detokenizer = Detokenizer(tokenizer, prompt, SamplingParams())
            for _ in range(200):
                bits = np.unpackbits(constraint.masks()[0].result().view(np.uint8), bitorder="little")
                token = int(rng.choice(np.flatnonzero(bits)))
                if token == end:
                    break
                assert token not in tokenizer.special_ids
                text += detokenizer.append(token)
                constraint.accept(token)
                if constraint.finished:
                    break
            text += detokenizer.finish()
            if spec.regex is not None:
                assert re.fullmatch(pattern, text), text
            else:
                jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("make", zoo.ZOO.values(), ids=zoo.ZOO)
def test_the_bytes_of_all_tokens_are_those_of_each(make: Any) -> None:
    tokenizer = Tokenizer(make(), chat_templates={}, special_tokens={})
    assert tokenizer.vocabulary_bytes() == [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
