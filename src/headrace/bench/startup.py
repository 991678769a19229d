"""From starting the program to the first token."""

import json
import statistics
import time
import urllib.request

from headrace.bench.results import Result
from headrace.bench.servers import server

PROMPT = "The mill stands where the river"


def run(model: str, flags: list[str], rounds: int) -> Result:
    """Starts `headrace serve` so many times with these flags, after once for nothing: its files are in memory then."""
    found: dict[str, list[float]] = {"ready_s": [], "first_token_s": [], "memory_mb": []}
    for number in range(rounds + 1):
        with server(model, flags) as started:
            body = {"model": started.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            request = urllib.request.Request(
                f"{started.url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=600) as answer:
                answer.read()
            answered = time.perf_counter()
            if number:
                found["ready_s"].append(started.ready - started.begun)
                found["first_token_s"].append(answered - started.begun)
                found["memory_mb"].append(started.memory() / 1e6)
    names = {"ready_s": "until it is ready, s", "first_token_s": "until the first token, s", "memory_mb": "memory, MB"}
    return Result(
        benchmark="startup",
        title="From the start of the program to the first token",
        note="`headrace serve` in a new process, with the model's file in the system's cache; until it says that it is "
        "ready, and until a client has the first token. Memory of both its processes then, shared pages counted once.",
        rows=[
            {"measure": names[name], "median": statistics.median(values), "range": [min(values), max(values)]}
            for name, values in found.items()
        ],
        settings={"model": model, "flags": flags, "rounds": rounds},
        details=found,
    )
