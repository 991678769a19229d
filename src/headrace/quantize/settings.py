"""What can be set for `headrace quantize`, and which of it means something for which method."""

from dataclasses import dataclass, fields

from headrace.config import reject_unknown
from headrace.errors import ConfigError
from headrace.quantize.schemes import PER_CHANNEL, PER_TENSOR, Scheme

METHODS = ("int8", "int4", "gptq", "awq", "smoothquant")
FORMATS = ("gptq", "awq", "compressed-tensors")
CALIBRATION = {"dataset", "samples", "seq_len", "seed"}
ALWAYS = {"method", "ignore", "format"}
MEANS_SOMETHING = {
    "int8": ALWAYS | {"group_size", "search_scales"},
    "int4": ALWAYS | {"group_size", "symmetric", "search_scales"},
    "gptq": ALWAYS
    | CALIBRATION
    | {"bits", "target_bits", "group_size", "symmetric", "search_scales", "desc_act", "static_groups", "damping"},
    "awq": ALWAYS | CALIBRATION | {"bits", "target_bits", "group_size", "symmetric"},
    "smoothquant": ALWAYS | CALIBRATION | {"alpha"},
}
DEFAULT_FORMAT = {
    "int8": "compressed-tensors",
    "int4": "compressed-tensors",
    "gptq": "gptq",
    "awq": "awq",
    "smoothquant": "compressed-tensors",
}


@dataclass(kw_only=True)
class QuantizeSettings:
    """How to quantize a model. What is None takes the method's default.

    method: "int8" or "int4" (round to nearest), "gptq", "awq", or "smoothquant" (8 bits for weights and activations).
    bits: of a weight: 2, 3, 4 or 8 for gptq, 3, 4 or 8 for awq (4 in its own format); by default 4.
    target_bits: instead of bits, an average of them, such as 4.5: layers that suffer more get more.
    group_size: columns that share a scale, -1 for a whole row; by default 128 (32 for int4, -1 for int8).
    symmetric: codes on both sides of zero, instead of zero points; by default so for all but awq.
    search_scales: choose scales by the least squared error; by default so for int4 and gptq.
    desc_act: take columns in order of falling importance (act-order).
    static_groups: with desc_act, keep the groups that columns have without it.
    damping: added to the Hessian, as a share of its mean diagonal; by default 0.01.
    alpha: how much of the activations' outliers goes into the weights, from 0 to 1; by default searched.
    dataset: calibration text: "wikitext2", "c4", "sharegpt", or a file or directory of text or JSON lines.
    samples: how many pieces of it; by default 128.
    seq_len: tokens in each; by default 512.
    seed: chooses the pieces; by default 0.
    ignore: names or patterns of matrices to leave as they are, such as "*.down_proj" (also several).
    format: of the output: "gptq", "awq", "compressed-tensors" or "gguf"; by default the method's own.
    """

    method: str
    bits: int | None = None
    target_bits: float | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    search_scales: bool | None = None
    desc_act: bool | None = None
    static_groups: bool | None = None
    damping: float | None = None
    alpha: float | None = None
    dataset: str | None = None
    samples: int | None = None
    seq_len: int | None = None
    seed: int | None = None
    ignore: list[str] | None = None
    format: str | None = None

    def plan(self) -> "Plan":
        """The settings with the method's defaults. Raises ConfigError for what is wrong or means nothing here."""
        method = self.method
        if method not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
        given = {f.name for f in fields(self) if getattr(self, f.name) is not None}
        for name in sorted(given - MEANS_SOMETHING[method]):
            having = [m for m in METHODS if name in MEANS_SOMETHING[m]]
            raise ConfigError(f"{name} means nothing for {method}; it is for {', '.join(having)}")

        bits = self.bits if self.bits is not None else 8 if method in ("int8", "smoothquant") else 4
        group_size = self.group_size
        if group_size is None:
            group_size = {"int8": PER_CHANNEL, "smoothquant": PER_CHANNEL, "int4": 32}.get(method, 128)
        symmetric = self.symmetric if self.symmetric is not None else method != "awq"
        if self.target_bits is not None:
            if self.bits is not None:
                raise ConfigError("bits and target_bits exclude each other: bits is the same for all layers")
            if not 2 <= self.target_bits <= 8 or (method == "awq" and self.target_bits < 3):
                raise ConfigError(
                    f"target_bits must be from {3 if method == 'awq' else 2} to 8, not {self.target_bits}"
                )
        packed = method == "awq" and (bits != 4 or self.target_bits is not None)
        default_format = "compressed-tensors" if packed else DEFAULT_FORMAT[method]
        if self.group_size == PER_TENSOR:
            raise ConfigError("group_size must be -1 or a number of columns, not 0")
        plan = Plan(
            method=method,
            scheme=Scheme(
                bits=bits,
                group_size=group_size,
                symmetric=symmetric,
                activation_bits=8 if method == "smoothquant" else None,
            ),
            target_bits=self.target_bits,
            search_scales=self.search_scales if self.search_scales is not None else method in ("int4", "gptq"),
            desc_act=bool(self.desc_act),
            static_groups=bool(self.static_groups),
            damping=0.01 if self.damping is None else self.damping,
            alpha=self.alpha,
            dataset=self.dataset,
            samples=128 if self.samples is None else self.samples,
            seq_len=512 if self.seq_len is None else self.seq_len,
            seed=self.seed or 0,
            ignore=tuple(self.ignore or ()),
            format=self.format or default_format,
        )
        plan.check()
        return plan


@dataclass(frozen=True, kw_only=True)
class Plan:
    """QuantizeSettings, complete and checked."""

    method: str
    scheme: Scheme
    target_bits: float | None
    search_scales: bool
    desc_act: bool
    static_groups: bool
    damping: float
    alpha: float | None
    dataset: str | None
    samples: int
    seq_len: int
    seed: int
    ignore: tuple[str, ...]
    format: str

    @property
    def calibrates(self) -> bool:
        return "dataset" in MEANS_SOMETHING[self.method]

    def check(self) -> None:
        if self.method == "awq" and self.scheme.bits == 2:
            raise ConfigError("awq is for 3, 4 or 8 bits, not 2")
        if self.static_groups and not self.desc_act:
            raise ConfigError("static_groups means something with desc_act only")
        if not 0 < self.damping <= 1:
            raise ConfigError(f"damping must be above 0 and at most 1, not {self.damping!r}")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must be from 0 to 1, not {self.alpha!r}")
        for name, value in (("samples", self.samples), ("seq_len", self.seq_len)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.calibrates and not self.dataset:
            raise ConfigError(
                f"{self.method} needs a dataset to calibrate with: wikitext2, c4, sharegpt, a file or a directory"
            )
        if self.format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, not {self.format!r}")
        if self.method in ("int8", "smoothquant") and self.format != "compressed-tensors":
            raise ConfigError(f"the format of {self.method} is compressed-tensors, not {self.format}")
        if self.format == "awq" and (self.scheme.bits != 4 or self.method == "gptq" or self.target_bits is not None):
            raise ConfigError("the awq format is for 4 bits, and not for the method gptq: use compressed-tensors")
        if self.format == "compressed-tensors" and self.desc_act and not self.static_groups:
            raise ConfigError("desc_act without static_groups is for the gptq format: other readers take it there only")


def settings_from(**given: object) -> QuantizeSettings:
    """Settings by keyword; an unknown one is an error that names the nearest known."""
    reject_unknown(given, (f.name for f in fields(QuantizeSettings)), "setting")
    return QuantizeSettings(**given)  # type: ignore[arg-type]  # checked by `plan`
