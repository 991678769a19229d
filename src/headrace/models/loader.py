"""From a checkpoint to a decoder: which tensors a model must have, and where each one goes."""

import logging

import torch
from tqdm import tqdm

from headrace.errors import ModelError
from headrace.formats.checkpoint import Checkpoint
from headrace.layers.attention import Attention
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMLP
from headrace.layers.norm import RMSNorm
from headrace.layers.rotary import frequencies
from headrace.models.config import DecoderConfig
from headrace.models.decoder import Decoder, DecoderLayer
from headrace.models.families import decoder_config
from headrace.ops.reference import Ops

logger = logging.getLogger(__name__)

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LISTED = 8  # how many tensor names a message lists


def expected_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config must have, by its Hugging Face name."""
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, c.hidden_size), NORM: (c.hidden_size,)}
    if not c.tied:
        shapes[HEAD] = (c.vocab_size, c.hidden_size)
    projections = {
        "self_attn.q_proj": (query, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, query, c.output_bias),
        "mlp.gate_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (c.intermediate_size, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, c.intermediate_size, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden_size, "post_attention_layernorm": c.hidden_size}
    if c.sandwich_norms:
        norms |= {"pre_feedforward_layernorm": c.hidden_size, "post_feedforward_layernorm": c.hidden_size}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for i in range(c.num_layers):
        for name, (rows, columns, bias) in projections.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (size,)
    return shapes


def _check(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Raises ModelError with the tensors that are missing or have another shape; warns of those that nobody reads."""
    expected, found = expected_shapes(config), checkpoint.shapes()
    wrong = [
        f"{name} must be {list(shape)}, is {'missing' if name not in found else list(found[name])}"
        for name, shape in expected.items()
        if found.get(name) != shape
    ]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise ModelError(f"{checkpoint.path}: tensors do not fit the config: {'; '.join(wrong[:LISTED])}{more}")
    # A tied model may carry the matrix a second time under the other name; that is no surprise.
    unread = [name for name in found if name not in expected and not (config.tied and name == HEAD)]
    if unread:
        more = f" and {len(unread) - LISTED} more" if len(unread) > LISTED else ""
        logger.warning("%s: ignoring tensors that the model does not use: %s%s", checkpoint.path, unread[:LISTED], more)


def load_decoder(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> Decoder:
    """Reads a whole model into memory, in the form in which `ops` computes, with a progress bar on a terminal.

    Raises ModelError for an architecture that is not supported, or tensors that do not fit the config.
    """
    try:
        c = decoder_config(checkpoint.config)
        ropes = [frequencies(r.theta, r.dim, r.scaling) for r in c.ropes]
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: {error}") from None
    _check(checkpoint, c)

    def vector(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A norm's weight or a bias. One bad value in it spoils every token, so it is looked for right here."""
        values = checkpoint.read(name).dequantize(dtype)
        if not torch.isfinite(values).all():
            raise ModelError(f"{checkpoint.path}: tensor {name!r} holds NaN or infinity: the file is damaged")
        return values

    def norm(name: str) -> RMSNorm:
        return RMSNorm(ops, vector(f"{name}.weight") + c.norm_offset, c.norm_eps)

    def linear(prefix: str, *names: str, bias: bool) -> Linear:
        weight = ops.matrix([checkpoint.read(f"{prefix}.{n}.weight") for n in names], dtype)
        biases = [vector(f"{prefix}.{n}.bias", dtype) for n in names] if bias else None
        return Linear(ops, weight, torch.cat(biases) if biases else None)

    def layer(i: int) -> DecoderLayer:
        prefix = f"model.layers.{i}"
        return DecoderLayer(
            attention_norm=norm(f"{prefix}.input_layernorm"),
            attention=Attention(
                ops,
                linear(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj", bias=c.qkv_bias),
                linear(f"{prefix}.self_attn", "o_proj", bias=c.output_bias),
                heads=c.num_heads,
                kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                q_norm=norm(f"{prefix}.self_attn.q_norm") if c.qk_norm else None,
                k_norm=norm(f"{prefix}.self_attn.k_norm") if c.qk_norm else None,
                scale=c.attention_scale,
                window=c.windows[i],
                softcap=c.attention_softcap,
            ),
            after_attention=norm(f"{prefix}.post_attention_layernorm") if c.sandwich_norms else None,
            mlp_norm=norm(f"{prefix}.{'pre_feedforward' if c.sandwich_norms else 'post_attention'}_layernorm"),
            mlp=GatedMLP(
                ops,
                linear(f"{prefix}.mlp", "gate_proj", "up_proj", bias=c.mlp_bias),
                linear(f"{prefix}.mlp", "down_proj", bias=c.mlp_bias),
                c.activation,
            ),
            after_mlp=norm(f"{prefix}.post_feedforward_layernorm") if c.sandwich_norms else None,
            rope=c.layer_ropes[i],
        )

    embedding = ops.table(checkpoint.read(EMBEDDING), dtype)
    head = embedding if c.tied else ops.matrix([checkpoint.read(HEAD)], dtype)
    layers = [layer(i) for i in tqdm(range(c.num_layers), desc="Loading layers", unit="layer", disable=None)]
    return Decoder(c, ops, embedding, ropes, layers, norm("model.norm"), Linear(ops, head))
