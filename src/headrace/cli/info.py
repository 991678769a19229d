"""`headrace info`: this machine, and what Headrace makes of it."""

import argparse
import json
from typing import Any

DESCRIPTION = """\
Tells what Headrace finds on this machine: versions, instruction sets and which
of them is used, threads and memory as affinity and control groups allow, and
the models that can be run."""

EXAMPLES = """\
examples:
  headrace info
  headrace info --json
  HEADRACE_ISA=generic headrace info    what another instruction set would change: only speed

exit status:
  0 all went well, 1 an error, 2 a wrong command line, 130 interrupted by Ctrl-C"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "info",
        usage="headrace info [--json]",
        help="what this machine has, and what can be run on it",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    found = machine()
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        width = max(map(len, found))
        for name, value in found.items():
            words = ", ".join(value) if isinstance(value, list) else value
            print(f"{name.replace('_', ' '):{width}}  {words}")
    return 0


def machine() -> dict[str, Any]:
    """What is printed. Raises ConfigError for a HEADRACE_ISA that cannot be, HeadraceError without native kernels."""
    import os
    import platform

    import torch

    from headrace import __version__
    from headrace.formats.ggml_blocks import BLOCK_TYPES
    from headrace.models.families import FAMILIES
    from headrace.ops.cpu import CpuOps
    from headrace.worker.memory import available_cpus, available_memory
    from headrace.worker.worker import default_threads

    memory, ops = available_memory(), CpuOps(threads=default_threads())
    return {
        "headrace": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "instruction_set": ops.isa,
        "instruction_sets_available": ops.available_isas,
        "threads": default_threads(),
        "cpus_allowed": available_cpus(),
        "memory_available": f"{memory.num_bytes / 2**30:.1f} GiB ({memory.limited_by})",
        "architectures": list(FAMILIES),
        "formats": ["safetensors", "GPTQ", "AWQ", "compressed-tensors", "GGUF"],
        "gguf_types": [block_type.name for block_type in BLOCK_TYPES.values()],
    }
