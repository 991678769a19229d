"""The kernels' object files: what they contain, their self-test, and another architecture."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# CMake and Ninja may be those of the virtual environment.
ENV = os.environ | {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def run(*command: str | Path) -> str:
    done = subprocess.run(command, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the installed module was built, or one that is made here where there is none."""
    for directory in (ROOT / "build").glob(f"cp{sys.version_info.major}{sys.version_info.minor}-*/"):
        run("cmake", "--build", directory, "--target", "headrace_selftest")
        return directory
    directory = tmp_path_factory.mktemp("kernels")
    run("cmake", "-G", "Ninja", "-S", ROOT / "csrc", "-B", directory, "-DHEADRACE_BINDINGS=OFF", "-Werror=dev")
    run("cmake", "--build", directory)
    return directory


def objects(build: Path) -> dict[str, Path]:
    """The object file of kernels.cpp for each instruction set that was compiled, whether this CPU has it or not."""
    return {path.parent.name.removeprefix("headrace_").removesuffix(".dir"): path for path in build.rglob("kernels*.o")}


def test_self_test(build: Path) -> None:
    assert run(build / "headrace_selftest").endswith("ok\n")


def test_every_instruction_set_is_compiled(build: Path) -> None:
    expected = {"generic", "avx2", "avx512"} if os.uname().machine == "x86_64" else {"generic"}
    assert objects(build).keys() == expected


def test_kernels_leak_no_symbols(build: Path) -> None:
    """A shared inline function compiled with AVX-512 could be the one that the linker keeps for all."""
    for isa, path in objects(build).items():
        symbols = [line.split(maxsplit=2) for line in run("nm", "--demangle", "--defined-only", path).splitlines()]
        shared = [name for _, kind, name in symbols if kind.isupper() or kind in "uvw"]
        assert shared == [f"headrace::{isa}::kernels"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86 instructions")
def test_registers_of_each_instruction_set(build: Path) -> None:
    """What is compiled for old machines has no instructions of new ones."""
    for isa, path in objects(build).items():
        assembly = run("objdump", "--disassemble", "--no-show-raw-insn", path)
        assert "mulps" in assembly, isa
        assert ("ymm" in assembly) == (isa != "generic"), isa
        assert ("zmm" in assembly) == (isa == "avx512"), isa


@pytest.mark.skipif(not shutil.which("aarch64-linux-gnu-g++"), reason="no cross compiler for aarch64")
def test_aarch64(build: Path, tmp_path: Path) -> None:
    output = run(ROOT / "tests/native/cross_aarch64.sh", tmp_path, build / "headrace_selftest")
    assert "warning" not in output, output
    if shutil.which("qemu-aarch64"):
        assert "same bits" in output
