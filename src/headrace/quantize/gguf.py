"""GGUF files in fewer bits: from one block type to another."""

import re
from collections import Counter
from pathlib import Path

from headrace.errors import ConfigError
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.files import reason
from headrace.formats.gguf_checkpoint import GGUFCheckpoint, hf_name
from headrace.formats.gguf_writer import TYPES, write_gguf
from headrace.models.loader import EMBEDDING, HEAD
from headrace.quantize.quantizer import matches


def quantize_gguf(
    source: Checkpoint, output: Path, block_type: str, ignore: tuple[str, ...] = ()
) -> tuple[Path, Counter[str]]:
    """Writes a GGUF file into the directory `output` with the matrices of another in a block type: F16, BF16, Q8_0,
    Q4_0 or Q4_1.

    Embedding and output matrix get eight bits where the others have four. A matrix that is stored in as few bits
    already stays as it is, and so do those whose names (Hugging Face's, without `.weight`) match a pattern in `ignore`.
    Returns the file, and how many tensors have which type. Raises ConfigError for a source of another format, or an
    output that cannot be written to; ModelError for values without a code.
    """
    if not isinstance(source, GGUFCheckpoint):
        raise ConfigError(f"{source.path}: is no GGUF file: the gguf format is made from such; choose another format")
    bits = {"F16": 16, "BF16": 16}.get(block_type) or TYPES[block_type].bits
    stored = {name: file.tensors[name].block_type for file in source.files for name in file.tensors}

    def type_of(name: str, shape: tuple[int, ...]) -> str | None:
        full = hf_name(name, source.arch)
        if len(shape) != 2 or any(matches(pattern, full.removesuffix(".weight")) for pattern in ignore):
            return None
        least = bits if full not in (EMBEDDING, HEAD) else max(bits, 8)
        if 0 < stored[name].bits <= least < 16:
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
    return path, Counter(write_gguf(path, source.files, block_type, type_of).values())
