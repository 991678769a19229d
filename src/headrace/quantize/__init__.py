"""Fewer bits for weights: schemes, rounding, calibration, GPTQ, AWQ, SmoothQuant, and the same for any torch model."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.quantize.modules import QuantizedLinear, quantize_model
    from headrace.quantize.schemes import Scheme

__all__ = ["QuantizedLinear", "Scheme", "quantize_model"]

_HOMES = {"QuantizedLinear": "modules", "quantize_model": "modules", "Scheme": "schemes"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace.quantize' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headrace.quantize.{_HOMES[name]}"), name)
