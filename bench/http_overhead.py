"""What HTTP costs: the same requests through `LLM` in one process and through `headrace serve`, in turns.

    python bench/http_overhead.py [--model default] [--streams 16] [--tokens 64] [--rounds 5]

Prints a table for docs/performance.md: tokens per second of both with medians and spread, and how long a client on an
idle server waits for its first token beyond what the engine itself takes for it.
"""

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace import LLM, SamplingParams

PROMPT = "The mill stands where the river"
SETTINGS = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "enable_prefix_caching": False}


def flags() -> list[str]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if not isinstance(value, bool)]
    return [*given, "--no-enable-prefix-caching"]


class Server:
    def __init__(self, model: str) -> None:
        program = Path(sys.executable).with_name("headrace")
        self.process = subprocess.Popen(
            [program, "serve", model, "--port", "0", *flags()],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        greeting = ""
        while "curl" not in greeting:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit("the server did not start")
            greeting += line
        self.model = re.search(r"Serving (\S+) on", greeting)[1]  # type: ignore[index]
        self.url = urlsplit(re.search(r"http://\S+", greeting)[0])  # type: ignore[index]

    async def stream(self, prompt: list[int], tokens: int) -> list[float]:
        """The moments at which the client has its tokens, after the one at which it asked."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        data = json.dumps(body | {"ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(self.url.hostname, self.url.port)
        moments = [time.perf_counter()]
        writer.write(head.encode() + data)
        async for line in reader:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()
        return moments

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def offline(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds


def online(server: Server, prompts: list[list[int]], tokens: int) -> float:
    async def run() -> float:
        begun = time.perf_counter()
        await asyncio.gather(*(server.stream(prompt, tokens) for prompt in prompts))
        return len(prompts) * tokens / (time.perf_counter() - begun)

    return asyncio.run(run())


def first_token_offline(llm: LLM, prompt: list[int]) -> float:
    begun = time.perf_counter()
    stream = llm.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0))
    next(stream)
    seconds = time.perf_counter() - begun
    stream.close()
    return seconds


def first_token_online(server: Server, prompt: list[int]) -> float:
    asked, first, *_ = asyncio.run(server.stream(prompt, 2))
    return first - asked


def summary(values: list[float]) -> tuple[float, str]:
    """The median, and the range around it."""
    return statistics.median(values), f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm, server = LLM(args.model, **SETTINGS), Server(args.model)
    prompts = [llm.tokenizer.encode(f"{PROMPT} {index}") for index in range(args.streams)]

    def in_turns(rounds: int, *measures: Callable[[], float]) -> list[list[float]]:
        for measure in measures:  # once for nothing: memory, caches, clocks
            measure()
        pairs = [[measure() for measure in measures] for _ in range(rounds)]
        return [list(column) for column in zip(*pairs, strict=True)]

    try:
        a, b = in_turns(
            args.rounds, lambda: offline(llm, prompts, args.tokens), lambda: online(server, prompts, args.tokens)
        )
        c, d = in_turns(
            10 * args.rounds,
            lambda: first_token_offline(llm, prompts[0]),
            lambda: first_token_online(server, prompts[0]),
        )
    finally:
        server.stop()
    costs = [100 * (1 - through / direct) for direct, through in zip(a, b, strict=True)]
    extra = [1000 * (through - direct) for direct, through in zip(c, d, strict=True)]
    rows: list[tuple[str, Any, Any, str]] = [
        (f"{args.streams} streams, tokens/s", summary(a)[1], summary(b)[1], f"{summary(costs)[1]} % less"),
        ("one stream, idle: first token, ms", summary([1000 * x for x in c])[1], summary([1000 * x for x in d])[1],
         f"{summary(extra)[1]} ms more"),
    ]  # fmt: skip
    print("| median (range) | offline | over HTTP | HTTP costs |\n|---|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
