"""Choosing an instruction set, and what happens without the native module."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import headrace
from headrace import _native
from headrace.errors import ConfigError, HeadraceError
from headrace.ops import cpu


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=os.environ | env, text=True, capture_output=True)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 instruction sets")
def test_available_are_those_that_the_kernel_reports() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    expected = ["generic"]
    if {"avx2", "fma", "f16c"} <= flags:
        expected.append("avx2")
        if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
            expected.append("avx512")
    assert _native.available_isas() == expected


@pytest.mark.parametrize("name", _native.available_isas())
def test_environment_variable_chooses(name: str) -> None:
    assert python("from headrace import _native; print(_native.isa())", HEADRACE_ISA=name).stdout == f"{name}\n"


def test_the_best_is_the_default() -> None:
    best = _native.available_isas()[-1]
    assert python("from headrace import _native; print(_native.isa())", HEADRACE_ISA="").stdout == f"{best}\n"


def test_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"there is no instruction set 'avx3'; available here: {' '.join(_native.available_isas())}"
    with pytest.raises(ValueError, match=message):
        _native.select_isa("avx3")
    done = python("from headrace import _native; _native.isa()", HEADRACE_ISA="avx3")
    assert done.stderr.endswith(f"ValueError: HEADRACE_ISA: {message}\n")

    def isa() -> str:
        raise ValueError(message)

    monkeypatch.setattr(_native, "isa", isa)
    with pytest.raises(ConfigError, match=message):
        cpu.CpuOps()


def test_name_that_this_machine_lacks() -> None:
    known = {"generic", "avx2", "avx512"} if os.uname().machine == "x86_64" else {"generic"}
    for name in known - set(_native.available_isas()):
        with pytest.raises(ValueError, match=f"this machine cannot run '{name}'; available here: generic"):
            _native.select_isa(name)


def test_without_the_native_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace._native", None)
    monkeypatch.delattr(headrace, "_native")
    with pytest.raises(HeadraceError, match="install Headrace again"):
        runpy.run_path(cpu.__file__)
