from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.http_server import T0_TEMPLATE, RunningServer, running_server
from helpers.tiny import save_t0, t0_config


@pytest.fixture(scope="session")
def t0_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("models") / "T0", chat_template=T0_TEMPLATE)


@pytest.fixture(scope="session")
def long_t0(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T0 with room for answers of thousands of tokens, which take a while."""
    return save_t0(tmp_path_factory.mktemp("long") / "T0", config=t0_config(max_position_embeddings=8192))


@pytest.fixture(scope="session")
def server(t0_directory: Path) -> Iterator[RunningServer]:
    """T0, served with a context of 512 tokens."""
    with running_server(t0_directory) as running:
        yield running
