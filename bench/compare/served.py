"""The same load on the servers of Headrace and of its peers, in turns.

    python bench/compare/served.py [--streams 16] [--requests 64] [--rounds 3] [--llama-server PATH]

Closed loop: each of the clients asks again when it has its answer. A peer from PyPI that brings no server which runs
several requests at once is not among these; llama.cpp's own `llama-server` is, where its path is given.
"""

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compare import row_of
from environments import PEERS, PLACE, Missing, directory_of, python_of

from headrace.bench.client import Client
from headrace.bench.datasets import DatasetSettings, Words, samples
from headrace.bench.load_settings import ServeSettings
from headrace.bench.results import Result, Row, as_text
from headrace.bench.serve import measure
from headrace.errors import ConfigError
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch

READY_SECONDS = 600.0
FIGURES = {
    "output_throughput_tok_s": ("output tokens", "tokens/s", True),
    "ttft_median_ms": ("TTFT, median", "ms", False),
    "itl_median_ms": ("ITL, median", "ms", False),
    "itl_p99_ms": ("ITL, 99 %", "ms", False),
    "worst_gap_median_ms": ("worst gap of an answer, median", "ms", False),
}


def command(name: str, model: str, port: int, args: argparse.Namespace) -> list[str]:
    """How a peer's server is started. Raises Missing where it cannot be."""
    length, streams = str(args.input_len + args.output_len + 64), str(args.streams)
    if name == "headrace":
        program = str(Path(sys.executable).with_name("headrace"))
        sizes = ["--max-model-len", length, "--max-num-seqs", streams, "--threads", str(args.threads)]
        return [program, "serve", model, "--port", str(port), *sizes]
    if name == "vllm":
        module = [str(python_of(PEERS["vllm"])), "-m", "vllm.entrypoints.openai.api_server"]
        sizes = ["--max-model-len", length, "--max-num-seqs", streams, "--dtype", "bfloat16"]
        return [*module, "--model", str(directory_of(model)), "--port", str(port), *sizes]
    if not args.llama_server:
        raise Missing("give the path of llama.cpp's llama-server; what PyPI has answers one request at a time")
    context = str((args.input_len + args.output_len + 64) * args.streams)
    sizes = ["-c", context, "-np", streams, "-t", str(args.threads)]
    return [args.llama_server, "-m", model, "--port", str(port), *sizes]


@contextmanager
def server(name: str, model: str, args: argparse.Namespace) -> Iterator[str]:
    """A peer's server, ready; its address. Raises Missing if it does not become so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = command(name, model, port, args)
    PLACE.mkdir(parents=True, exist_ok=True)
    path = PLACE / f"served-{name}.log"
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with path.open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env)
        try:
            url = f"http://127.0.0.1:{port}"
            asyncio.run(until_ready(process, url, path))
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def until_ready(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    client = Client(url, timeout=60)
    deadline = time.monotonic() + READY_SECONDS
    model = ""
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise Missing(f"ended: {said[-1].strip()[:200] if said else 'it said nothing'}")
        try:
            model = model or (await client.get("models"))["data"][0]["id"]
            body = {"model": model, "prompt": "x", "max_tokens": 1, "stream": True}
            if not (await client.stream("completions", body)).error:
                return
        except (ConfigError, LookupError):
            pass  # it does not answer yet
        await asyncio.sleep(0.5)
    raise Missing(f"not ready within {READY_SECONDS:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--peers", default="headrace,vllm,llama-server", help="(default: %(default)s)")
    parser.add_argument("--llama-server", metavar="PATH", help="of llama.cpp's own server")
    parser.add_argument("--streams", type=int, default=16, help="clients (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="of a round (default: %(default)s)")
    parser.add_argument("--input-len", type=int, default=256, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()
    names = args.peers.split(",")
    for name in names:
        if name not in ("headrace", "vllm", "llama-server"):
            parser.error(f"known servers are headrace, vllm and llama-server, not {name!r}")
    result = compare(args.model or str(fetch(DEFAULT_MODEL)), names, args)
    print(as_text(result.rows))
    for name, reason in result.details["missing"].items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    if args.output_json:
        result.save(args.output_json)


def compare(model: str, names: list[str], args: argparse.Namespace) -> Result:
    tokenizer = open_checkpoint(model).tokenizer()
    words = Words(tokenizer)
    found: dict[str, list[Row]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as servers:
        urls = {}
        for name in names:
            try:
                urls[name] = servers.enter_context(server(name, model, args))
            except (Missing, OSError, subprocess.CalledProcessError) as error:
                missing[name] = str(error)
        for number in range(args.rounds + 1):
            for name, url in urls.items():
                if name in missing:
                    continue
                asked = samples(
                    DatasetSettings(
                        num_prompts=args.requests, input_len=args.input_len, output_len=args.output_len,
                        dataset_seed=number,
                    ),
                    words,
                )  # fmt: skip
                settings = ServeSettings(base_url=url, max_concurrency=args.streams, num_warmups=0)
                try:
                    row, _, _ = asyncio.run(measure(settings, asked, tokenizer))
                except ConfigError as error:
                    missing[name] = str(error)
                    continue
                if number:  # the first round warms up
                    found.setdefault(name, []).append(row)
    rows = []
    for key, (what, unit, more_is_better) in FIGURES.items():
        values = {name: [row[key] for row in rounds] for name, rounds in found.items()}
        rows.append(row_of(what, unit, values, names, more_is_better=more_is_better))
    return Result(
        benchmark="compare_served",
        title=f"Headrace and its peers as served: {Path(model).stem}, {args.streams} clients",
        note=f"{args.requests} requests of {args.input_len} tokens and {args.output_len} more, from {args.streams} "
        "clients that ask again when they have their answer; medians, with the range of the rounds, in turns. "
        "`ratio`: Headrace by the best peer, so that more is better in each line. vLLM computes in bfloat16, the "
        "others on the file's own numbers."
        + "".join(f" Missing: {name} ({reason})." for name, reason in missing.items()),
        rows=rows,
        settings={k: v for k, v in vars(args).items() if k != "output_json"} | {"model": Path(model).name},
        details={"rounds": found, "missing": missing},
    )


if __name__ == "__main__":
    main()
