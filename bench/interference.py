"""What a long prompt does to running streams, with and without chunks that are sized by time.

    python bench/interference.py MODEL [--prompt 6000] [--streams 8]

Eight streams decode; then the long prompt comes. Printed is the usual gap between two tokens of a stream, the worst one
from then until the prompt's first token, and how long the prompt waits for that token.
"""

import argparse
import time
from statistics import median

from headrace.config import EngineConfig
from headrace.engine.core import Engine
from headrace.engine.request import Request
from headrace.sampling.params import SamplingParams


def measure(model: str, streams: int, prompt: int, target_itl_ms: float | None) -> tuple[float, float, float]:
    """Milliseconds: the usual gap, the worst gap beside the prompt, and the prompt's time to its first token."""
    engine = Engine(EngineConfig(model=model, target_itl_ms=target_itl_ms, enable_prefix_caching=False))
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    for i in range(streams):
        engine.add_request(Request(f"stream-{i}", [100 + i] * 16, endless))
    for _ in range(40):  # in which the cost model learns as well
        engine.step()
    last = dict.fromkeys(range(streams), time.perf_counter())
    gaps: list[float] = []

    def step() -> bool:
        deltas = engine.step()
        now = time.perf_counter()
        for delta in deltas:
            if delta.request_id.startswith("stream-"):
                stream = int(delta.request_id.removeprefix("stream-"))
                gaps.append(now - last[stream])
                last[stream] = now
        return any(delta.request_id == "long" for delta in deltas)

    for _ in range(20):
        step()
    usual = median(gaps)
    gaps.clear()
    begin = time.perf_counter()
    ids = [i % 200 + 1 for i in range(prompt)]
    engine.add_request(Request("long", ids, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)))
    while not step():
        pass
    return 1e3 * usual, 1e3 * max(gaps), 1e3 * (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=6000)
    args = parser.parse_args()
    print("chunks by      usual gap ms  worst gap ms  first token of the prompt ms")
    for name, target in (("tokens", 0.0), ("time, auto", None), ("time, 100 ms", 100.0)):
        usual, worst, first = measure(args.model, args.streams, args.prompt, target)
        print(f"{name:14} {usual:12.1f} {worst:13.1f} {first:29.0f}", flush=True)


if __name__ == "__main__":
    main()
