"""Pictures of results. matplotlib is needed for these alone: it is in the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.results import Row
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> "tuple[Figure, Any]":
    """An empty figure in inches and its axes, without a screen. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("pictures need matplotlib: pip install 'headrace[bench]'") from None
    made = Figure(figsize=(width, height), layout="constrained", dpi=120)
    FigureCanvasAgg(made)
    return made, made.subplots(rows, columns)


def save(made: "Figure", path: str | Path) -> None:
    """Writes a .png, .svg or .pdf file. Raises ConfigError if it cannot."""
    try:
        # Without dates and random names, so that the same results give the same file.
        made.savefig(str(path), metadata={"Software": None} if str(path).endswith(".png") else None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def sweep(rows: Sequence[Row]) -> "Figure":
    """Throughput, and the times that clients see, over the rate of requests."""
    made, (left, middle, right) = figure(12, 3.6, 1, 3)
    rates = [row["rate_req_s"] for row in rows]
    left.plot(rates, rates, color="lightgrey", label="asked for")
    left.plot(rates, [row["request_throughput_req_s"] for row in rows], marker="o", label="answered")
    if all("goodput_req_s" in row for row in rows):
        left.plot(rates, [row["goodput_req_s"] for row in rows], marker="s", label="answered well")
    left.set(xlabel="requests a second asked for", ylabel="requests a second")
    for axes, name in ((middle, "ttft"), (right, "tpot")):
        for which in ("median", "p99"):
            axes.plot(rates, [row[f"{name}_{which}_ms"] for row in rows], marker="o", label=which)
        axes.set(xlabel="requests a second asked for", ylabel=f"{name.upper()}, ms", yscale="log")
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.legend(frameon=False)
    return made
