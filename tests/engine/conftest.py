"""Engines that several tests of this folder run requests through."""

from pathlib import Path

import pytest

from headrace import LLM
from helpers.t0_engine import t0_llm
from helpers.tiny import save_t0


@pytest.fixture(scope="session")
def t0_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("t0"))


@pytest.fixture(scope="session")
def t0(t0_dir: Path) -> LLM:
    """T0 with the default settings, but a seed."""
    return t0_llm(t0_dir)
