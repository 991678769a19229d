"""Headrace against its peers on the same machine, model, threads, prompts and lengths, in turns.

    make compare
    python bench/compare/compare.py --peers headrace,llama.cpp --cells prefill512,decode1 --rounds 3

Each peer runs in a process and an environment of its own, and only one of them computes at any time. They take turns in
each cell (A B C A B C ...), so that a machine that slows down slows them all. A peer that cannot be installed, or
cannot run the model, is reported as missing, with the reason.

prefill: tokens a second of one prompt, until its first token. decode: of so many sequences together, from the time that
64 more tokens take. The ratio is Headrace's median by that of the best peer.
"""

import argparse
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from environments import PEERS, ROOT, RUNNERS, Missing, PeerPlan, directory_of, python_of

from headrace.bench.results import Result, Row, as_text
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch

START_SECONDS = 600.0
DECODED = 64  # tokens that a decode cell times
SCORE_WINDOW = 512


class Process:
    """A peer's process. Raises Missing if it does not start, or ends."""

    def __init__(self, name: str, plan: PeerPlan, settings: dict[str, Any]) -> None:
        self.name = name
        python = python_of(plan)
        given = settings | plan.settings
        if plan.needs_directory:
            given["directory"] = str(directory_of(settings["model"]))
        self.log_path = ROOT / "build" / "compare" / f"run-{re.sub(r'[^a-z]+', '-', name)}.log"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.log_path.open("w")
        env = os.environ | {"OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1"}
        begun = time.perf_counter()
        self.process = subprocess.Popen(
            [python, RUNNERS / f"run_{plan.engine}.py", json.dumps(given)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, text=True, env=env, cwd=RUNNERS,
        )  # fmt: skip
        self.about = self._answer()["about"]
        self.start_seconds = time.perf_counter() - begun

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` says why
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.stop()
            said = [text for text in self.log_path.read_text(errors="replace").splitlines() if text.strip()]
            status = f"ended by signal {-self.process.returncode}" if self.process.returncode < 0 else "ended"
            raise Missing(f"{status}: {said[-1].strip()[:200] if said else 'it said nothing'}")
        found: dict[str, Any] = json.loads(line)
        return found

    def memory(self) -> int:
        """The most bytes that it, and its children, had in memory."""
        parent = psutil.Process(self.process.pid)
        return sum(peak(p.pid) for p in (parent, *parent.children(recursive=True)))

    def stop(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def peak(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", text)
    return 1024 * int(found[1]) if found else 0


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    """New ones each time, so that no cache of prefixes helps anybody."""
    return [[rng.randrange(1000, 20_000) for _ in range(length)] for _ in range(count)]


def measure(peer: Process, cell: str, seed: int) -> float:
    """Tokens a second."""
    rng = random.Random(seed)
    kind, number, context = re.fullmatch(r"(prefill|decode)(\d+)(?:@(\d+))?", cell).groups()  # type: ignore[union-attr]
    if kind == "prefill":
        return int(number) / float(peer.ask(run=prompts(rng, 1, int(number)), output_len=1)["seconds"])
    count, length = int(number), int(context or 128)
    short = float(peer.ask(run=prompts(rng, count, length), output_len=1)["seconds"])
    long = float(peer.ask(run=prompts(rng, count, length), output_len=1 + DECODED)["seconds"])
    return count * DECODED / max(1e-9, long - short)


def perplexity(peer: Process, ids: list[int]) -> float | None:
    """Of a text in windows of 512 tokens; None where the peer gives no probabilities."""
    losses: list[float] = []
    for start in range(0, len(ids) - 1, SCORE_WINDOW):
        part = ids[start : start + SCORE_WINDOW]
        if len(part) > 1:
            logprobs = peer.ask(score=part)["logprobs"]
            if logprobs is None:
                return None
            losses += [-value for value in logprobs]
    return math.exp(statistics.fmean(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--peers", default=";".join(PEERS), help="with ; between them (default: %(default)s)")
    parser.add_argument(
        "--cells", default="prefill512,prefill2048,decode1@128,decode1@2048,decode8,decode32",
        help="prefillN, decodeN or decodeN@CONTEXT (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="(default: all cores)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each cell (default: %(default)s)")
    parser.add_argument("--score-tokens", type=int, default=2048, help="of Python's manual, for the perplexity")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()
    cells = args.cells.split(",")
    for cell in cells:
        if not re.fullmatch(r"(prefill[1-9]\d*|decode[1-9]\d*(@[1-9]\d*)?)", cell):
            parser.error(f"a cell is like prefill512, decode8 or decode1@2048, not {cell!r}")
    names = [name.strip() for name in args.peers.split(";")]
    for name in names:
        if name not in PEERS:
            parser.error(f"known peers are {'; '.join(PEERS)}, not {name!r}")
    model = args.model or str(fetch(DEFAULT_MODEL))
    result = compare(model, names, cells, args.threads, args.rounds, args.score_tokens)
    print(as_text(result.rows))
    for name, reason in result.details["missing"].items():
        print(f"missing: {name}: {reason}", file=sys.stderr)
    if args.output_json:
        result.save(args.output_json)


def sizes(cells: list[str]) -> dict[str, int]:
    """The longest sequence, and the most of them at once, that the cells need."""
    counts = [int(re.findall(r"\d+", cell)[0]) if cell.startswith("decode") else 1 for cell in cells]
    lengths = [
        int(cell.removeprefix("prefill")) if cell.startswith("prefill") else int([*cell.split("@"), "128"][1])
        for cell in cells
    ]
    return {"max_num_seqs": max(counts), "max_model_len": max([*lengths, SCORE_WINDOW]) + DECODED + 2}


def compare(model: str, names: list[str], cells: list[str], threads: int, rounds: int, score_tokens: int) -> Result:
    settings = {"model": model, "threads": threads, **sizes(cells)}
    missing: dict[str, str] = {}
    peers: dict[str, Process] = {}
    for name in names:
        try:
            peers[name] = Process(name, PEERS[name], settings)
        except (Missing, OSError, subprocess.CalledProcessError) as error:
            missing[name] = str(error)

    def without_the_fallen(name: str, error: Missing) -> None:
        missing[name] = str(error)
        del peers[name]

    rates: dict[str, dict[str, list[float]]] = {cell: {} for cell in cells}
    for cell in cells:
        for number in range(rounds + 1):
            for name, peer in list(peers.items()):
                try:
                    rate = measure(peer, cell, seed=number)
                except Missing as error:
                    without_the_fallen(name, error)
                    continue
                if number:  # the first round warms up
                    rates[cell].setdefault(name, []).append(rate)
        found_here = ", ".join(f"{name} {statistics.median(values):.4g}" for name, values in rates[cell].items())
        print(f"{cell}: {found_here}", file=sys.stderr)
    rows = [row_of(cell, "tokens/s", rates[cell], names, more_is_better=True) for cell in cells]
    ids = text_ids(model, score_tokens)
    quality: dict[str, list[float]] = {}
    for name, peer in list(peers.items()):
        try:
            found = perplexity(peer, ids)
        except Missing as error:
            without_the_fallen(name, error)
            continue
        if found is not None:
            quality[name] = [found]
    memory = {name: [peer.memory() / 1e6] for name, peer in peers.items()}
    starts = {name: [peer.start_seconds] for name, peer in peers.items()}
    about = {name: peer.about for name, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    rows.append(row_of("loaded, in a new process", "s", starts, names, more_is_better=False))
    rows.append(row_of("most memory", "MB", memory, names, more_is_better=False))
    rows.append(row_of("perplexity", "", quality, names, more_is_better=False))
    return Result(
        benchmark="compare",
        title=f"Headrace and its peers: {Path(model).stem}, {threads} threads",
        note="Medians, with the range of the rounds; all in one run, in turns, each peer at the best settings that are "
        "known here. `ratio`: Headrace by the best peer, so that more is better in each line. "
        + "; ".join(f"{name}: {text}" for name, text in about.items())
        + "".join(f". Missing: {name} ({reason})" for name, reason in missing.items())
        + ".",
        rows=rows,
        settings={"cells": cells, "rounds": rounds, **settings},
        details={"rates": rates, "missing": missing, "about": about},
    )


def row_of(cell: str, unit: str, found: dict[str, list[float]], names: list[str], *, more_is_better: bool) -> Row:
    """A line of the table: each peer's median and range, and the ratio."""
    medians = {name: statistics.median(values) for name, values in found.items()}
    row: Row = {"what": cell, "unit": unit}
    for name in names:
        values = found.get(name)
        row[name] = None if not values else spread(values)
    others = [value for name, value in medians.items() if name != "headrace"]
    row["ratio"] = None
    if "headrace" in medians and others:
        row["ratio"] = medians["headrace"] / max(others) if more_is_better else min(others) / medians["headrace"]
    return row


def spread(values: list[float]) -> str:
    middle = f"{statistics.median(values):.4g}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.4g} to {max(values):.4g})"


def text_ids(model: str, count: int) -> list[int]:
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return open_checkpoint(model).tokenizer().encode(text[: 8 * count])[:count]


if __name__ == "__main__":
    main()
