"""What is in the wheel and in the source distribution, and that the declared dependencies are those that are used."""

import ast
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

from headrace import __version__

ROOT = Path(__file__).parents[2]
PYTHON = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*.py")}
SOURCES = PYTHON | {"src/headrace/_native.pyi", "src/headrace/py.typed"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(kind: str, source: Path, out: Path) -> Path:
    """Builds with the backend itself, in the current environment, as `pip` does without build isolation."""
    code = f"from scikit_build_core import build; print(build.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out / done.stdout.splitlines()[-1]


def test_wheel(tmp_path: Path) -> None:
    names = set(zipfile.ZipFile(build("wheel", ROOT, tmp_path)).namelist())
    info = f"headrace-{__version__}.dist-info/"
    native = {name for name in names if name.startswith("headrace/_native.") and name.endswith(".so")}
    assert len(native) == 1
    assert {name for name in names if not name.startswith(info)} - native == {
        name.removeprefix("src/") for name in SOURCES
    }
    assert {info + "licenses/LICENSE", info + "entry_points.txt", info + "METADATA"} <= names


def test_source_distribution_has_all_that_a_wheel_is_built_from(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path)) as tar:
        names = {member.name.removeprefix(f"headrace-{__version__}/") for member in tar if member.isfile()}
    kernels = {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()}
    assert names == SOURCES | kernels | {"LICENSE", "README.md", "PKG-INFO", "pyproject.toml"}


def test_dependencies_are_those_that_are_imported() -> None:
    imported = set()
    for name in PYTHON:
        for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    imported -= sys.stdlib_module_names | {"headrace", "_typeshed"}
    distributions = metadata.packages_distributions()
    used = {normal(distributions[module][0]) for module in imported} - {"pydantic-core"}  # a part of pydantic
    # uvicorn's parser of HTTP/1.1: our limits on connections hang on it, though by uvicorn's name for it only.
    declared = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["bench"]
    assert used | {"httptools"} == {normal(requirement) for requirement in declared}


def test_everything_that_ci_installs_is_pinned() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    pins = {normal(name): version for name, version in pinned.items()}
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    assert {normal(requirement) for requirement in wanted} <= pins.keys()
    for name, version in pins.items():
        try:
            installed = metadata.version(name).split("+")[0]
        except metadata.PackageNotFoundError:
            continue  # of an extra that is not installed
        assert installed == version, name


def normal(requirement: str) -> str:
    """The normal form of the name in a requirement: `Foo_Bar>=1` gives `foo-bar`."""
    name = requirement.split(">")[0].split("=")[0].strip()
    return name.lower().replace("_", "-").replace(".", "-")
