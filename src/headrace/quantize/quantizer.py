"""Quantizing a whole model: layer by layer from a checkpoint to a directory that others read too."""

import fnmatch
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from headrace.errors import ConfigError, ModelError
from headrace.formats import awq as awq_format
from headrace.formats import compressed_tensors as ct_format
from headrace.formats import gptq as gptq_format
from headrace.formats.checkpoint import Checkpoint, CodedWeight, IntegerWeight
from headrace.formats.files import reason
from headrace.formats.hf_checkpoint import read_tensors
from headrace.formats.hf_writer import dense_dtype, dense_tensor, finish, shard_name, write_json, write_shard
from headrace.models.loader import EMBEDDING, HEAD, DecoderReader, expected_shapes
from headrace.ops.reference import Ops
from headrace.quantize import awq, smoothquant
from headrace.quantize.folding import Folding
from headrace.quantize.gptq import Settings, gptq, row_errors
from headrace.quantize.layer_run import STAGES, LayerRun, Overlay, Statistics, statistics
from headrace.quantize.rounding import round_to_nearest
from headrace.quantize.schemes import Scheme
from headrace.quantize.sensitivity import choose, levels, sensitivities
from headrace.quantize.settings import Plan

logger = logging.getLogger(__name__)

STATE = "quantization_state.json"  # while the work is under way
REPORT = "quantization_report.json"
SCALES = torch.float16


@dataclass(frozen=True)
class MatrixReport:
    """One matrix: its scheme, and the squared error of what it gives as a share of what it gave (of its values where
    there is no calibration data)."""

    name: str
    bits: int
    group_size: int
    error: float


class Quantizer:
    """Takes a checkpoint to `output` by a plan. What was finished before an interrupt is found there and kept.

    Raises ConfigError or ModelError before anything is computed where plan and model do not fit.
    """

    def __init__(self, source: Checkpoint, output: Path, plan: Plan) -> None:
        self.source, self.output, self.plan = source, output, plan
        self.weights = Overlay(source)
        self.reader = DecoderReader(self.weights, Ops(), torch.float32)
        self.config = self.reader.config
        self.total = self.config.num_layers + 1  # shards: one for each layer, and one for the rest
        self.bits = dict.fromkeys(range(self.config.num_layers), plan.scheme.bits)  # of each layer
        self._check_matrices()

    def quantizes(self, name: str) -> bool:
        """Whether a matrix, by its name without `.weight`, gets fewer bits."""
        if not any(name.endswith("." + m) for stage in STAGES for m in stage):
            return False
        return not any(matches(pattern, name) for pattern in self.plan.ignore)

    def _check_matrices(self) -> None:
        scheme, form = self.plan.scheme, self.plan.format
        names = [
            name.removesuffix(".weight") for name, shape in expected_shapes(self.config).items() if len(shape) == 2
        ]
        quantized = [name for name in names if self.quantizes(name)]
        for pattern in self.plan.ignore:
            if not any(matches(pattern, name) for name in names):
                raise ConfigError(f"ignore: {pattern!r} is not the name of any matrix, such as {names[1]}")
        if not quantized:
            raise ConfigError("ignore leaves no matrix to quantize")
        for name in quantized:
            rows, columns = expected_shapes(self.config)[f"{name}.weight"]
            weight = self.source.read(f"{name}.weight")
            if isinstance(weight, CodedWeight):
                raise ModelError(
                    f"{self.source.path}: is quantized already ({name} has {weight.coded.bits} bits): "
                    f"start from the model that it was made from"
                )
            if scheme.group_size > 0 and columns % scheme.group_size:
                fitting = [str(size) for size in (256, 128, 64, 32, 16, 8) if columns % size == 0]
                raise ConfigError(
                    f"group_size {scheme.group_size} does not divide the {columns} columns of {name}; "
                    f"{', '.join([*fitting, '-1'])} would"
                )
            possible = [scheme.bits] if self.plan.target_bits is None else levels(self.plan.target_bits)
            for what, number in (("rows", rows), ("columns", columns)):
                unit = 8 if form == "awq" and what == "rows" else max(32 if b == 3 else 32 // b for b in possible)
                if form in ("gptq", "awq") and number % unit:
                    raise ConfigError(
                        f"the {form} format needs a multiple of {unit} {what}, and {name} has {number}: "
                        f"use the compressed-tensors format"
                    )

    def run(self, samples: list[list[int]] | None) -> list[MatrixReport]:
        """Does the work, with a progress bar on a terminal. samples: token ids, for methods that calibrate."""
        if self.plan.calibrates and not (samples and all(samples)):
            raise ConfigError(f"{self.plan.method} needs calibration data: samples of at least one token each")
        state = self._begin(samples)
        with torch.inference_mode():
            run = LayerRun(self.reader, samples) if samples else None
            if self.plan.target_bits is not None and run is not None:
                self._choose_bits(run, self.plan.target_bits, state)
            bar = tqdm(range(self.config.num_layers), desc="Quantizing", unit="layer", disable=None)
            for i in bar:
                self._layer(i, run, state)
            rest = {
                name: dense_tensor(self.source.read(name), dense_dtype(self.source.read(name)))
                for name in (EMBEDDING, "model.norm.weight", *([] if self.config.tied else [HEAD]))
            }
            write_shard(self._shard(self.config.num_layers), rest)
        reports = [MatrixReport(**entry) for entries in state["layers"].values() for entry in entries]
        report = {"settings": state["settings"], "matrices": [asdict(r) for r in reports]}
        if "sensitivity" in state:
            report["sensitivity"] = state["sensitivity"]
        write_json(self.output / REPORT, report)
        shards = [self._shard(i) for i in range(self.total)]
        dtypes = {str(t.dtype).removeprefix("torch.") for n, t in rest.items() if n == EMBEDDING}
        changes = {"quantization_config": self._format_config(), "torch_dtype": dtypes.pop()}
        finish(self.output, self.source, shards, changes)
        (self.output / STATE).unlink()
        return reports

    def _choose_bits(self, run: LayerRun, target: float, state: dict[str, Any]) -> None:
        if "bits" not in state:
            shapes = expected_shapes(self.config)

            def matrices(i: int) -> list[str]:
                return self._matrices(i, range(len(STAGES)))

            hidden = run.hidden
            found = sensitivities(run, self.weights, matrices, self.plan.scheme, levels(target))
            run.hidden = hidden
            sizes = {i: sum(shapes[name][0] * shapes[name][1] for name in matrices(i)) for i in found}
            state["bits"] = {str(i): bits for i, bits in choose(found, sizes, target).items()}
            state["sensitivity"] = {str(i): {str(b): kl for b, kl in by_bits.items()} for i, by_bits in found.items()}
            write_json(self.output / STATE, state)
        self.bits |= {int(i): bits for i, bits in state["bits"].items()}

    def _scheme(self, i: int) -> Scheme:
        return replace(self.plan.scheme, bits=self.bits[i])

    def _shard(self, index: int) -> Path:
        return self.output / shard_name(index + 1, self.total)

    def _begin(self, samples: list[list[int]] | None) -> dict[str, Any]:
        """The state of the work in the output directory: new, or what an interrupted run has left."""
        settings = asdict(self.plan) | {"source": str(self.source.path)}
        print_of_data = hashlib.sha256(json.dumps(samples).encode()).hexdigest()
        fresh = {"settings": settings | {"data": print_of_data}, "layers": {}}
        path = self.output / STATE
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            if path.exists():
                state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                if state.get("settings") != json.loads(json.dumps(fresh["settings"])):
                    raise ConfigError(
                        f"{self.output}: holds the beginning of a quantization with other settings: "
                        f"give the same again, or another directory"
                    )
                return state
            if any(self.output.iterdir()):
                raise ConfigError(f"{self.output}: is not empty: name a new directory for the output")
        except OSError as error:
            raise ConfigError(f"{self.output}: cannot be written to: {reason(error)}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: is damaged ({error}): remove the directory") from None
        write_json(path, fresh)
        return fresh

    def _layer(self, i: int, run: LayerRun | None, state: dict[str, Any]) -> None:
        shard, prefix = self._shard(i), f"model.layers.{i}."
        names = [name for name in expected_shapes(self.config) if name.startswith(prefix)]
        if str(i) in state["layers"] and shard.exists():
            if run is not None:  # only to know what it gives
                self.weights.changed = read_tensors(shard, self._format_config())
                run.pass_layer(self.reader.layer(i))
        else:
            made = self._quantize_layer(i, run)
            tensors: dict[str, Tensor] = {}
            for name in names:
                module = name.removesuffix(".weight")
                weight = self.weights.read(name)
                if name in made:
                    tensors |= {f"{module}.{end}": t for end, t in self._to_tensors(weight.integers()).items()}
                else:
                    tensors[name] = dense_tensor(weight, dense_dtype(self.source.read(name)))
            write_shard(shard, tensors)
            state["layers"][str(i)] = [asdict(report) for report in made.values()]
            write_json(self.output / STATE, state)
        self.weights.changed = {}

    def _quantize_layer(self, i: int, run: LayerRun | None) -> dict[str, MatrixReport]:
        """Replaces the layer's matrices in `weights`, and takes the samples through the layer as it then is."""
        if run is not None:  # they are read several times: decoded once is enough
            for name in self._matrices(i, range(len(STAGES))):
                self.weights.replace(name, self.weights.values(name))
        match self.plan.method:
            case "gptq":
                return self._in_turn(i, run)
            case "awq" | "smoothquant":
                return self._folded(i, run)
            case _:
                return self._rounded(i)

    def _rounded(self, i: int) -> dict[str, MatrixReport]:
        reports: dict[str, MatrixReport] = {}
        for name in self._matrices(i, range(len(STAGES))):
            values = self.weights.values(name)
            coded = self._round(values, name, self._scheme(i))
            error = (coded.dequantize() - values).square().sum() / values.square().sum().clamp(min=1e-30)
            reports[name] = self._take(name, coded, float(error))
        return reports

    def _in_turn(self, i: int, run: LayerRun | None) -> dict[str, MatrixReport]:
        """Each stage sees what the stages before it give after their own quantization ("true sequential")."""
        assert run is not None
        reports: dict[str, MatrixReport] = {}
        for stage in range(len(STAGES)):
            layer = self.reader.layer(i)
            names = self._matrices(i, [stage])
            inputs = run.inputs(layer, stage)
            if names:
                for report in self._gptq(names, statistics(inputs, run.num_tokens), self._scheme(i)):
                    reports[report.name] = report
            run.pass_stage(self.reader.layer(i), stage)
        return reports

    def _gptq(self, names: list[str], stats: Statistics, scheme: Scheme) -> Iterator[MatrixReport]:
        plan = self.plan
        settings = Settings(plan.damping, plan.desc_act, plan.static_groups, plan.search_scales, SCALES)
        joined = torch.cat([self.weights.values(name) for name in names])
        title = ", ".join(name.removesuffix(".weight") for name in names)
        try:
            coded = gptq(joined, stats.hessian, scheme, settings, title)
        except ModelError as error:
            raise ModelError(f"{self.source.path}: {title} {error}") from None
        yield from self._split(names, joined, coded, stats.hessian)

    def _folded(self, i: int, run: LayerRun | None) -> dict[str, MatrixReport]:
        """Scales for all stages by what they are given in the layer as it was, from the last back, since a stage's
        scales change the matrices of the one before it; then each is rounded."""
        assert run is not None
        plan, scheme = self.plan, self._scheme(i)
        folding = Folding(self.weights, self.config, i)
        layer = self.reader.layer(i)
        hidden = run.hidden
        stats = []
        for stage in range(len(STAGES)):
            stats.append(statistics(run.inputs(layer, stage), run.num_tokens))
            run.pass_stage(layer, stage)
        run.hidden = hidden
        reports: dict[str, MatrixReport] = {}
        for stage in reversed(range(len(STAGES))):
            seen = stats[stage]
            if self._matrices(i, [stage]):
                if plan.method == "awq":
                    scales, alpha, _ = awq.search_scales(folding, stage, seen, scheme, SCALES)
                    chosen: float | None = alpha
                else:
                    scales, chosen = smoothquant.smoothing(folding, stage, seen, scheme, plan.alpha)
                each = folding.fold(stage, scales)
                stats[stage] = replace(seen, hessian=seen.hessian / each[:, None] / each)
                logger.info("layer %d, stage %d: alpha %s", i, stage, chosen)
        for stage in range(len(STAGES)):
            for name in self._matrices(i, [stage]):
                values, hessian = self.weights.values(name), stats[stage].hessian
                rounded = values
                if plan.method == "awq" and "q_proj" not in name and "k_proj" not in name:
                    rounded = awq.clip(values, hessian, scheme, SCALES)
                coded = self._round(rounded, name, scheme)
                reports |= {r.name: r for r in self._split([name], values, coded, hessian)}
        run.pass_layer(self.reader.layer(i))
        return reports

    def _split(self, names: list[str], joined: Tensor, coded: IntegerWeight, hessian: Tensor) -> Iterator[MatrixReport]:
        """Takes the rows of matrices that were quantized as one, and tells their errors."""
        errors = row_errors(coded.dequantize() - joined, hessian)
        whole = row_errors(joined, hessian)
        start = 0
        for name in names:
            rows = slice(start, start + self.weights.read(name).shape[0])
            start = rows.stop
            part = replace(
                coded,
                codes=coded.codes[rows],
                scales=coded.scales[rows],
                minimums=None if coded.minimums is None else coded.minimums[rows],
            )
            yield self._take(name, part, float(errors[rows].sum() / whole[rows].sum().clamp(min=1e-30)))

    def _round(self, values: Tensor, name: str, scheme: Scheme) -> IntegerWeight:
        try:
            return round_to_nearest(values, scheme, search=self.plan.search_scales, scale_dtype=SCALES)
        except ModelError as error:
            raise ModelError(f"{self.source.path}: tensor {name!r} {error}") from None

    def _take(self, name: str, coded: IntegerWeight, error: float) -> MatrixReport:
        self.weights.changed[name] = CodedWeight(coded, self.plan.scheme.activation_bits)
        return MatrixReport(name, coded.bits, self.plan.scheme.group_size, error)

    def _matrices(self, i: int, stages: Any) -> list[str]:
        names = [f"model.layers.{i}.{m}" for stage in stages for m in STAGES[stage]]
        return [f"{name}.weight" for name in names if self.quantizes(name)]

    def _to_tensors(self, coded: IntegerWeight | None) -> Mapping[str, Tensor]:
        assert coded is not None
        match self.plan.format:
            case "gptq":
                return gptq_format.to_tensors(coded, SCALES, "gptq" if self.plan.scheme.symmetric else "gptq_v2")
            case "awq":
                return awq_format.to_tensors(coded, SCALES)
            case _:
                return ct_format.to_tensors(coded, SCALES, packed=self.plan.scheme.activation_bits is None)

    def _format_config(self) -> Mapping[str, Any]:
        plan, scheme = self.plan, self.plan.scheme
        ignored = [
            name.removesuffix(".weight")
            for name, shape in expected_shapes(self.config).items()
            if len(shape) == 2 and name != EMBEDDING and not self.quantizes(name.removesuffix(".weight"))
        ]
        layers_of: dict[int, list[int]] = {}  # by bits
        for i, bits in self.bits.items():
            layers_of.setdefault(bits, []).append(i)
        most = max(layers_of, key=lambda bits: len(layers_of[bits]))
        others = {
            rf"^model\.layers\.({'|'.join(map(str, layers))})\..*": bits
            for bits, layers in sorted(layers_of.items())
            if bits != most
        }
        match plan.format:
            case "gptq":
                return gptq_format.config(
                    most,
                    scheme.group_size,
                    symmetric=scheme.symmetric,
                    desc_act=plan.desc_act and not plan.static_groups,
                    damping=plan.damping,
                    bits_of=others,
                    not_converted=ignored,
                )
            case "awq":
                return awq_format.config(scheme.group_size, symmetric=scheme.symmetric, not_converted=ignored)
            case _:
                groups = {}
                for number, (target, bits) in enumerate(
                    [*((f"re:{name}", bits) for name, bits in others.items()), ("Linear", most)]
                ):
                    args = ct_format.scheme(
                        bits, scheme.group_size, symmetric=scheme.symmetric, activation_bits=scheme.activation_bits
                    )
                    groups[f"group_{number}"] = {"targets": [target], **args}
                form = "pack-quantized" if scheme.activation_bits is None else "int-quantized"
                return ct_format.config(groups, form, sorted({"lm_head", *ignored}))


def matches(pattern: str, name: str) -> bool:
    """Whether a name is meant by a pattern with * and ?, or after `re:` by a regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigError(f"ignore: {pattern!r} is not a regular expression: {error}") from None
    return fnmatch.fnmatchcase(name, pattern)
