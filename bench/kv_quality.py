"""What an int8 KV cache costs in quality: the same text through the same weights, over both caches.

    python bench/kv_quality.py [--model FILE.gguf] [--text FILE] [--tokens 2048]

Reported are the perplexity of the text over each cache, and the Kullback-Leibler divergence of the next-token
distributions: KL(P || Q) in nats per token, P over the cache in the model's own dtype and Q over int8. The text is cut
into windows; in each the tokens run in chunks, so that all but the first read most keys and values from the cache.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from headrace.bench.results import Result, as_text
from headrace.config import EngineConfig
from headrace.formats.checkpoint import Checkpoint
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch
from headrace.ops.reference import KV_SCALE_DTYPE, KVCache, RaggedBatch
from headrace.worker.worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, help="plain text in UTF-8 (default: the manual that Python brings along)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its start (default: %(default)s)")
    parser.add_argument("--window", type=int, default=2048, help="tokens that see each other (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per step (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="of activations and of the other cache (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="(default: torch's own)")
    parser.add_argument("--output-json", help="save the table")
    args = parser.parse_args()

    model = args.model or fetch(DEFAULT_MODEL)
    checkpoint = open_checkpoint(str(model))
    ids = text_ids(checkpoint, args.text, args.tokens)
    config = EngineConfig(
        model=str(model),
        dtype=args.dtype,
        backend=args.backend,
        threads=args.threads,
        max_model_len=args.window,
        max_num_seqs=1,
    )
    figures = compare(Worker(config, checkpoint), ids, args.window, args.chunk)
    result = Result(
        benchmark="kv_quality",
        title="What an int8 KV cache costs in quality",
        note="The same text through the same weights, over a cache in the model's own dtype and over one with "
        "`--kv-cache-dtype int8`: Kullback-Leibler divergence of the next token's distribution in nats, and how much "
        "more context the same memory holds.",
        rows=[{"figure": name, "value": f"{value:.5g}"} for name, value in figures.items()],
        settings={"model": Path(model).name, "tokens": len(ids), "window": args.window, "chunk": args.chunk},
    )
    print(as_text(result.rows))
    if args.output_json:
        result.save(args.output_json)


@torch.inference_mode()
def compare(worker: Worker, ids: list[int], window: int, chunk: int) -> dict[str, Any]:
    """Both caches of one worker's model over all windows of a text."""
    model, size = worker.decoder.config, worker.config.block_size
    own = worker.caches[0].keys.dtype
    plain, int8 = (
        [
            worker.ops.kv_cache(-(-window // size), size, model.num_kv_heads, model.head_dim, dtype)
            for _ in range(model.num_layers)
        ]
        for dtype in (own, torch.int8)
    )
    pairs = (
        (logprobs(worker, part, start, chunk, plain), logprobs(worker, part, start, chunk, int8), part[start + 1 :])
        for part in (ids[first : first + window] for first in range(0, len(ids) - 1, window))
        for start in range(0, len(part), chunk)
    )
    return quality(pairs) | {
        "tokens in the same memory": model.kv_bytes_per_token(own.itemsize)
        / model.kv_bytes_per_token(1, KV_SCALE_DTYPE.itemsize),
    }


def text_ids(checkpoint: Checkpoint, text: Path | None, tokens: int) -> list[int]:
    """The first tokens of a text in UTF-8, or of the manual that Python brings along."""
    content = text.read_text(encoding="utf-8") if text else "\n\n".join(topics[name] for name in sorted(topics))
    return checkpoint.tokenizer().encode(content)[:tokens]


def quality(pairs: Iterable[tuple[Tensor, Tensor, list[int]]]) -> dict[str, float]:
    """What the second of two runs costs: each chunk's log-probabilities `[n, vocab]` of both, and what follows."""
    divergences, losses, same = [], [], 0
    for p, q, following in pairs:
        divergences.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        targets = torch.tensor(following[: len(p)])
        rows = torch.arange(len(targets))
        losses.append(-torch.stack([p[rows, targets], q[rows, targets]], 1))
    loss = torch.cat(losses)
    divergence, perplexity = torch.cat(divergences), loss.mean(0).exp()
    # The tokens' differences are taken for independent of each other.
    error = float((loss[:, 1] - loss[:, 0]).std()) / len(loss) ** 0.5
    return {
        "tokens": len(divergence),
        "perplexity": float(perplexity[0]),
        "perplexity int8": float(perplexity[1]),
        "perplexity ratio": float(perplexity[1] / perplexity[0]),
        "its 95 % interval, +-": 1.96 * error,
        "mean KL divergence": float(divergence.mean()),
        "99th percentile of KL": float(divergence.quantile(0.99)),
        "largest KL": float(divergence.max()),
        "same most likely token": same / len(divergence),
    }


def logprobs(worker: Worker, ids: list[int], start: int, chunk: int, caches: list[KVCache]) -> Tensor:
    """Log-probabilities, float64 `[tokens, vocab]`, after each token of a chunk; what comes before is in the cache."""
    end = min(start + chunk, len(ids))
    positions = torch.arange(start, end)
    blocks = -(-end // worker.config.block_size)
    batch = RaggedBatch([end - start], [end], positions, slots=positions, block_tables=torch.arange(blocks)[None])
    rows = torch.arange(end - start)
    return (
        worker.decoder.forward(torch.tensor(ids[start:end]), [batch] * len(caches), caches, rows)
        .double()
        .log_softmax(-1)
    )


if __name__ == "__main__":
    main()
