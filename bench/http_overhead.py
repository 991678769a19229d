"""What HTTP costs: the same requests through `LLM` in one process and through `headrace serve`, in turns.

    python bench/http_overhead.py [--model default] [--streams 16] [--tokens 64] [--rounds 5]

Prints tokens per second of both with medians and spread, and how long a client on an
idle server waits for its first token beyond what the engine itself takes for it.
"""

import argparse
import asyncio
import statistics
import time

from headrace import LLM, SamplingParams
from headrace.bench.client import Client, Reply
from headrace.bench.results import Result, as_text
from headrace.bench.servers import Started, server
from headrace.bench.stats import in_turns

PROMPT = "The mill stands where the river"
SETTINGS = {"max_model_len": 1024, "kv_cache_memory": "512MiB", "enable_prefix_caching": False}


def flags() -> list[str]:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if not isinstance(value, bool)]
    return [*given, "--no-enable-prefix-caching"]


async def stream(url: str, model: str, prompt: list[int], tokens: int) -> Reply:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    reply = await Client(url).stream("completions", body | {"ignore_eos": True})
    assert not reply.error, reply.error
    return reply


def offline(llm: LLM, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds


def online(server: Started, prompts: list[list[int]], tokens: int) -> float:
    async def run() -> float:
        begun = time.perf_counter()
        await asyncio.gather(*(stream(server.url, server.model, prompt, tokens) for prompt in prompts))
        return len(prompts) * tokens / (time.perf_counter() - begun)

    return asyncio.run(run())


def first_token_offline(llm: LLM, prompt: list[int]) -> float:
    begun = time.perf_counter()
    stream = llm.stream(prompt, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0))
    next(stream)
    seconds = time.perf_counter() - begun
    stream.close()
    return seconds


def first_token_online(server: Started, prompt: list[int]) -> float:
    reply = asyncio.run(stream(server.url, server.model, prompt, 2))
    return reply.moments[0] - reply.sent


def summary(values: list[float]) -> str:
    """The median, and the range around it."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()
    llm = LLM(args.model, **SETTINGS)
    prompts = [llm.tokenizer.encode(f"{PROMPT} {index}") for index in range(args.streams)]

    with server(args.model, flags()) as started:
        many = {
            "offline": lambda: offline(llm, prompts, args.tokens),
            "online": lambda: online(started, prompts, args.tokens),
        }
        a, b = in_turns(args.rounds, many).values()
        one = {
            "offline": lambda: first_token_offline(llm, prompts[0]),
            "online": lambda: first_token_online(started, prompts[0]),
        }
        c, d = in_turns(10 * args.rounds, one).values()
    costs = [100 * (1 - through / direct) for direct, through in zip(a, b, strict=True)]
    extra = [1000 * (through - direct) for direct, through in zip(c, d, strict=True)]
    result = Result(
        benchmark="http_overhead",
        title="What HTTP costs",
        note="The same requests through `LLM` in one process and through `headrace serve`, in turns: medians with "
        "their ranges. The last column is what a client on an idle server waits beyond what the engine takes.",
        rows=[
            {"of": f"{args.streams} streams, tokens/s", "offline": summary(a), "over_http": summary(b),
             "http_costs": f"{summary(costs)} % less"},
            {"of": "one stream, first token, ms", "offline": summary([1000 * x for x in c]),
             "over_http": summary([1000 * x for x in d]), "http_costs": f"{summary(extra)} ms more"},
        ],
        settings={"model": args.model, "streams": args.streams, "tokens": args.tokens, "rounds": args.rounds,
                  **SETTINGS},
        details={"offline": a, "online": b, "first_offline": c, "first_online": d},
    )  # fmt: skip
    print(as_text(result.rows))
    if args.output_json:
        result.save(args.output_json)


if __name__ == "__main__":
    main()
