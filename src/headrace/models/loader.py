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
from headrace.ops.reference import Matrix, Ops

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


class DecoderReader:
    """Makes a decoder, or single layers of it, from a checkpoint.

    config: of the decoder. ropes: as Decoder has them.
    Raises ModelError for an architecture that is not supported, or tensors that do not fit the config.
    """

    def __init__(self, checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> None:
        self.checkpoint, self.ops, self.dtype = checkpoint, ops, dtype
        try:
            self.config = decoder_config(checkpoint.config)
            self.ropes = [frequencies(r.theta, r.dim, r.scaling) for r in self.config.ropes]
        except ModelError as error:
            raise ModelError(f"{checkpoint.path}: {error}") from None
        _check(checkpoint, self.config)

    def layer(self, i: int) -> DecoderLayer:
        c, prefix = self.config, f"model.layers.{i}"
        return DecoderLayer(
            attention_norm=self._norm(f"{prefix}.input_layernorm"),
            attention=Attention(
                self.ops,
                self._linear(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj", bias=c.qkv_bias),
                self._linear(f"{prefix}.self_attn", "o_proj", bias=c.output_bias),
                heads=c.num_heads,
                kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                q_norm=self._norm(f"{prefix}.self_attn.q_norm") if c.qk_norm else None,
                k_norm=self._norm(f"{prefix}.self_attn.k_norm") if c.qk_norm else None,
                scale=c.attention_scale,
                window=c.windows[i],
                softcap=c.attention_softcap,
            ),
            after_attention=self._norm(f"{prefix}.post_attention_layernorm") if c.sandwich_norms else None,
            mlp_norm=self._norm(f"{prefix}.{'pre_feedforward' if c.sandwich_norms else 'post_attention'}_layernorm"),
            mlp=GatedMLP(
                self.ops,
                self._linear(f"{prefix}.mlp", "gate_proj", "up_proj", bias=c.mlp_bias),
                self._linear(f"{prefix}.mlp", "down_proj", bias=c.mlp_bias),
                c.activation,
            ),
            after_mlp=self._norm(f"{prefix}.post_feedforward_layernorm") if c.sandwich_norms else None,
            rope=c.layer_ropes[i],
        )

    def embedding(self) -> Matrix:
        return self.ops.table(self.checkpoint.read(EMBEDDING), self.dtype)

    def norm(self) -> RMSNorm:
        """The one after the last layer."""
        return self._norm("model.norm")

    def head(self, embedding: Matrix) -> Linear:
        """The output matrix, which may be the embedding."""
        tied = self.config.tied
        return Linear(self.ops, embedding if tied else self.ops.matrix([self.checkpoint.read(HEAD)], self.dtype))

    def _vector(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A norm's weight or a bias. One bad value in it spoils every token, so it is looked for right here."""
        values = self.checkpoint.read(name).dequantize(dtype)
        if not torch.isfinite(values).all():
            raise ModelError(f"{self.checkpoint.path}: tensor {name!r} holds NaN or infinity: the file is damaged")
        return values

    def _norm(self, name: str) -> RMSNorm:
        c = self.config
        return RMSNorm(self.ops, self._vector(f"{name}.weight") + c.norm_offset, c.norm_eps)

    def _linear(self, prefix: str, *names: str, bias: bool) -> Linear:
        weight = self.ops.matrix([self.checkpoint.read(f"{prefix}.{n}.weight") for n in names], self.dtype)
        biases = [self._vector(f"{prefix}.{n}.bias", self.dtype) for n in names] if bias else None
        return Linear(self.ops, weight, torch.cat(biases) if biases else None)


def load_decoder(checkpoint: Checkpoint, ops: Ops, dtype: torch.dtype) -> Decoder:
    """Reads a whole model into memory, in the form in which `ops` computes, with a progress bar on a terminal.

    Raises ModelError as DecoderReader does.
    """
    reader = DecoderReader(checkpoint, ops, dtype)
    embedding = reader.embedding()
    head = reader.head(embedding)
    bar = tqdm(range(reader.config.num_layers), desc="Loading layers", unit="layer", disable=None)
    layers = [reader.layer(i) for i in bar]
    return Decoder(reader.config, ops, embedding, reader.ropes, layers, reader.norm(), head)
