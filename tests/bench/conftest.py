from pathlib import Path

import pytest

from helpers.http_server import T0_TEMPLATE
from helpers.tiny import save_t0


@pytest.fixture(scope="session")
def t0_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_t0(tmp_path_factory.mktemp("models") / "T0", chat_template=T0_TEMPLATE)
