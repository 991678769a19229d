"""Fixtures and settings for all tests."""

import logging
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

# `make test` runs several of these processes side by side; each gets its share of the cores.
CORES = max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))

# Set before any test module is imported, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", str(CORES))  # an oversubscribed machine is slow and hides real timeouts
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning about forks
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may depend on a hub
torch.set_num_threads(min(torch.get_num_threads(), CORES))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that starts a command in this process leaves no handler with a stream that is closed later."""
    before = logging.root.handlers[:], logging.root.level, logging.getLogger("headrace").level
    yield
    logging.root.handlers[:], level, ours = before
    logging.root.setLevel(level)
    logging.getLogger("headrace").setLevel(ours)


@pytest.fixture(autouse=True)
def _same_random_numbers_every_time() -> None:
    """Each test starts from the same seeds, so that it fails alone as it fails in the whole run."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
