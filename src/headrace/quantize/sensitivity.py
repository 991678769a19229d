"""Which layers suffer most from few bits, and so which should have more: mixed precision.

Each layer by itself is rounded to nearest at each number of bits, all others stay as they are, and what counts is how
far the model's next-token distributions move: the mean KL divergence from those of the model as it is.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from headrace.formats.checkpoint import CodedWeight
from headrace.layers.linear import Linear
from headrace.quantize.layer_run import LayerRun, Overlay
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import BITS, Scheme

TOKENS = 2048  # of the calibration data; each layer and number of bits takes them through the rest of the model


def levels(target: float) -> list[int]:
    """The numbers of bits to choose from for an average of `target`."""
    lowest = max(bits for bits in BITS if bits <= target)
    return [bits for bits in BITS if bits >= lowest]


@torch.inference_mode()
def sensitivities(
    run: LayerRun, weights: Overlay, matrices: Callable[[int], list[str]], scheme: Scheme, bits: list[int]
) -> dict[int, dict[int, float]]:
    """By layer and number of bits, the KL divergence in nats per token. run: at the door of the first layer.

    matrices: the names of the weights in a layer that would be rounded. Memory holds one layer at a time, and what the
    samples are at the door of each.
    """
    reader = run.reader
    samples, count = [], 0
    for x in run.hidden:
        samples.append(x[: TOKENS - count])
        count += len(samples[-1])
        if count >= TOKENS:
            break
    head = reader.head(reader.embedding())
    doors = [samples]
    for i in range(reader.config.num_layers):
        run.hidden = doors[-1]
        run.pass_layer(reader.layer(i))
        doors.append(run.hidden)
    exact = [_logprobs(run, x, head) for x in doors[-1]]
    found: dict[int, dict[int, float]] = {}
    todo = [(i, b) for i in range(reader.config.num_layers) if matrices(i) for b in bits]
    for i, b in tqdm(todo, desc="Measuring sensitivity", unit="run", disable=None):
        for name in matrices(i):
            coded = round_to_nearest(weights.values(name), replace(scheme, bits=b), scale_dtype=torch.float16)
            weights.changed[name] = CodedWeight(coded)
        run.hidden = doors[i]
        run.pass_layer(reader.layer(i))
        weights.changed = {}
        for later in range(i + 1, reader.config.num_layers):
            run.pass_layer(reader.layer(later))
        total = 0.0
        for x, p in zip(run.hidden, exact, strict=True):
            q = _logprobs(run, x, head)
            total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
        found.setdefault(i, {})[b] = max(total / count, 0.0)
    return found


def _logprobs(run: LayerRun, x: Tensor, head: Linear) -> Tensor:
    logits = head(run.reader.norm()(x)).float()
    cap = run.reader.config.final_softcap
    return (logits if cap is None else run.ops.softcap(logits, cap)).log_softmax(-1)


def choose(found: Mapping[int, Mapping[int, float]], sizes: Mapping[int, int], target: float) -> dict[int, int]:
    """Bits for each layer, with an average over all weights of at most `target`.

    All begin with the fewest; then what lowers the divergence most for each bit spent is done, as long as it fits.
    sizes: how many weights a layer has.
    """
    chosen = {layer: min(by_bits) for layer, by_bits in found.items()}
    budget = target * sum(sizes[layer] for layer in found)
    spent = sum(sizes[layer] * bits for layer, bits in chosen.items())
    while True:
        steps = []
        for layer, bits in chosen.items():
            for more in (b for b in found[layer] if b > bits):
                cost = sizes[layer] * (more - bits)
                if spent + cost <= budget:
                    steps.append(((found[layer][bits] - found[layer][more]) / cost, -layer, more, cost))
        if not steps:
            return chosen
        _, negative, more, cost = max(steps)
        chosen[-negative] = more
        spent += cost
