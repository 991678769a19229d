"""The native ops on every instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from headrace import _native
from headrace.ops.cpu import CpuOps


@pytest.fixture(params=_native.available_isas())
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    before = _native.isa()
    _native.select_isa(request.param)
    yield CpuOps(threads=2)
    _native.select_isa(before)
