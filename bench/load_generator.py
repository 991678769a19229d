"""What the load generator of `headrace bench serve` costs itself: against a server that answers at known moments.

    python bench/load_generator.py [--streams 1,100,1000] [--tokens 50] [--ttft-ms 500] [--itl-ms 100]

Both run on this machine, in a process each. What is found beyond the server's own delays is the generator's error, and
the network's, and the fake server's, which has the same work to do.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from itertools import pairwise

from headrace.bench import load
from headrace.bench.client import Client, Reply
from headrace.bench.datasets import Sample
from headrace.bench.results import Result, Row, as_text
from headrace.bench.stats import percentile

ARRIVAL_SECONDS = 2.0  # until all streams have begun


async def measure(url: str, streams: int, tokens: int, ttft: float) -> Row:
    client = Client(url)

    async def send(sample: Sample) -> Reply:
        body = {"prompt": "x", "max_tokens": sample.output_len, "stream": True}
        return await client.stream("completions", body)

    moments = [ARRIVAL_SECONDS * i / streams for i in range(streams)]
    begun = time.process_time()
    records, seconds = await load.run([Sample([], "x", tokens)] * streams, moments, send)
    busy = time.process_time() - begun
    replies = [r.reply for r in records if not r.reply.error]
    firsts = [1000 * (r.reply.moments[0] - r.start - ttft) for r in records if not r.reply.error]
    gaps = [1000 * (b - a) for r in replies for a, b in pairwise(r.moments)]
    return {
        "streams": streams,
        "errors": streams - len(replies),
        "tokens_tok_s": sum(len(r.moments) for r in replies) / seconds,
        "ttft_error_median_ms": percentile(firsts, 50),
        "ttft_error_p99_ms": percentile(firsts, 99),
        "itl_median_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "processor_time_us": 1e6 * busy / sum(len(r.moments) for r in replies),
        "share_of_a_core_percent": 100 * busy / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", default="1,100,1000", help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=50, help="of each (default: %(default)s)")
    parser.add_argument("--ttft-ms", type=float, default=500.0, help="of the server (default: %(default)s)")
    parser.add_argument("--itl-ms", type=float, default=100.0, help="of the server (default: %(default)s)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()
    delays = [f"--ttft-ms={args.ttft_ms}", f"--itl-ms={args.itl_ms}"]
    command = [sys.executable, "-m", "headrace.bench.fake_server", *delays]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        rows = [
            asyncio.run(measure(url, int(streams), args.tokens, args.ttft_ms / 1000))
            for streams in args.streams.split(",")
        ]
    print(as_text(rows))
    if args.output_json:
        Result(
            benchmark="load_generator",
            title="What the load generator costs",
            note=f"Streams against a fake server in another process. Its first token comes after {args.ttft_ms:g} ms, "
            f"each next one {args.itl_ms:g} ms later. The errors are what is found beyond that; the processor's time "
            "is that of the generator alone, for each token.",
            rows=rows,
            settings={"tokens": args.tokens, "ttft_ms": args.ttft_ms, "itl_ms": args.itl_ms},
        ).save(args.output_json)


if __name__ == "__main__":
    main()
