"""Headrace: LLM inference and serving at the speed of the machine you have.

Importing this package is cheap: torch and everything else heavy is loaded when a name is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.engine.llm import LLM
    from headrace.sampling.params import SamplingParams, StructuredOutputs

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "headrace.engine.llm",
    "SamplingParams": "headrace.sampling.params",
    "StructuredOutputs": "headrace.sampling.params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
