"""Tests for which not everybody has the time: `HEADRACE_FULL_LENGTH=1` runs them, or runs them at full length."""

import os

import pytest

FULL = os.environ.get("HEADRACE_FULL_LENGTH") == "1"
full_length = pytest.mark.skipif(not FULL, reason="set HEADRACE_FULL_LENGTH=1 to run it")
