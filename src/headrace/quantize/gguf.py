"""GGUF files, made of other GGUF files or of models in another format."""

import re
from collections import Counter
from functools import partial
from pathlib import Path

from headrace.errors import ConfigError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.files import reason
from headrace.formats.gguf_checkpoint import GGMLWeight, GGUFCheckpoint, hf_name
from headrace.formats.gguf_writer import TYPES, Content, Source, write_gguf
from headrace.models.loader import EMBEDDING, HEAD
from headrace.quantize.gguf_export import content_of
from headrace.quantize.quantizer import matches

# Keys that are not copied: of how the other file was split, aligned and quantized.
LEFT_OUT = re.compile(r"split\..*|general\.(alignment|file_type|quantization_version)|quantize\..*")


def quantize_gguf(
    source: Checkpoint, output: Path, block_type: str, ignore: tuple[str, ...] = ()
) -> tuple[Path, Counter[str]]:
    """Writes a GGUF file into the directory `output` with a model's matrices in a block type: F16, BF16, Q8_0, Q4_0 or
    Q4_1.

    Embedding and output matrix get eight bits where the others have four. A matrix that is stored in as few bits
    already stays as it is, and so do those whose names (Hugging Face's, without `.weight`) match a pattern in `ignore`.
    Returns the file, and how many tensors have which type. Raises ConfigError for a source that cannot be told in GGUF,
    or an output that cannot be written to; ModelError for values without a code.
    """
    content = _content_of_file(source) if isinstance(source, GGUFCheckpoint) else content_of(source)
    bits = {"F16": 16, "BF16": 16}.get(block_type) or TYPES[block_type].bits

    def type_of(name: str, shape: tuple[int, ...]) -> str | None:
        full = hf_name(name, content.arch)
        if len(shape) != 2 or any(matches(pattern, full.removesuffix(".weight")) for pattern in ignore):
            return None
        least = bits if full not in (EMBEDDING, HEAD) else max(bits, 8)
        if 0 < content.tensors[name].block_type.bits <= least < 16:
            return None
        return block_type if least == bits else "Q8_0"

    stem = re.sub(r"-00001-of-\d{5}$", "", source.path.stem)
    path = output / f"{stem}-{block_type}.gguf"
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise ConfigError(f"{output}: is not empty: name a new directory for the output")
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written to: {reason(error)}") from None
    return path, Counter(write_gguf(path, content, block_type, type_of).values())


def _content_of_file(source: GGUFCheckpoint) -> Content:
    """All that a GGUF file holds, in however many parts."""
    first = source.files[0]
    entries = [bytes(raw) for key, raw in first.entries.items() if not LEFT_OUT.fullmatch(key)]
    tensors = {}
    for file in source.files:
        for name, info in file.tensors.items():
            load = partial(GGMLWeight, file.blocks(name), info.block_type, info.shape)
            tensors[name] = Source(file.path, info.shape, info.block_type, load)
    return Content(source.arch, entries, tensors)
