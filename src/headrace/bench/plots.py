"""Pictures of results. matplotlib is needed for these alone: it is in the extra `bench`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.results import Row
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headrace.bench.simulator import Run


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


def save_below_each_other(figures: "Sequence[Figure]", path: str | Path) -> None:
    """Writes several figures as one .png file."""
    import numpy as np
    from matplotlib.image import imsave

    images = []
    for made in figures:
        canvas: Any = made.canvas
        canvas.draw()
        images.append(np.asarray(canvas.buffer_rgba()))
    width = max(image.shape[1] for image in images)
    padded = [np.pad(im, ((0, 0), (0, width - im.shape[1]), (0, 0)), constant_values=255) for im in images]
    try:
        imsave(str(path), np.concatenate(padded))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def latency(rows: Sequence[Row]) -> "Figure":
    """Time per token and tokens a second over the number of sequences, a line for each length of prompts."""
    made, (left, middle, right) = figure(12, 3.6, 1, 3)
    columns = (("tpot_ms", "time per token, ms"), ("decode_tok_s", "tokens a second"), ("ttft_ms", "first token, ms"))
    for length in dict.fromkeys(row["input_len"] for row in rows):
        of = [row for row in rows if row["input_len"] == length]
        for axes, (key, label) in zip((left, middle, right), columns, strict=True):
            axes.plot(
                [row["batch"] for row in of], [row[key] for row in of], marker="o", label=f"after {length} tokens"
            )
            axes.set(xlabel="sequences at once", ylabel=label)
    left.legend(frameon=False)
    return made


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


def timeline(runs: "Sequence[tuple[str, Run]]") -> "Figure":
    """Which request runs in which step, one panel for each run, over the same time."""
    made, panels = figure(11, 2.1 * len(runs) + 0.6, len(runs))
    longest = max(run.seconds for _, run in runs)
    for axes, (name, run) in zip(panels, runs, strict=True):
        places = _places(run)
        bars: dict[tuple[int, int, str], list[tuple[float, float]]] = {}  # by place, request and kind
        for begun, ended, spans in run.steps:
            for span in spans:
                bars.setdefault((places[span.row], span.request, span.kind), []).append((begun, ended - begun))
        named = set()
        for (place, request, kind), pieces in bars.items():
            look: dict[str, Any] = {"facecolor": "#d9d9d9", "hatch": "////"}
            if kind != "idle":
                look = {"facecolor": COLORS[request % len(COLORS)], "alpha": 1.0 if kind == "prompt" else 0.45}
                if request not in named:
                    named.add(request)
                    axes.text(pieces[0][0], place, f" {request + 1}", va="center", fontsize=9, fontweight="bold")
            axes.broken_barh(pieces, (place - 0.43, 0.86), edgecolor="white", linewidth=0.3, **look)
        axes.axvline(run.seconds, color="black", linewidth=1)
        axes.set(xlim=(0, 1.02 * longest), ylabel="place in the batch", yticks=range(max(places.values()) + 1))
        axes.set_title(f"{name}: {run.seconds:.1f} s", loc="left")
        axes.invert_yaxis()
    panels[-1].set_xlabel("seconds; dark: prompt, light: one token each, grey: computed for nothing")
    return made


COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")


def _places(run: "Run") -> dict[int, int]:
    """For each row the place where it is drawn: the first that nobody has at that time."""
    last = {span.row: i for i, (_, _, spans) in enumerate(run.steps) for span in spans}
    free: list[int] = []
    places: dict[int, int] = {}
    count = 0
    for i, (_, _, spans) in enumerate(run.steps):
        for span in spans:
            if span.row not in places:
                if not free:
                    free, count = [count], count + 1
                places[span.row] = free.pop(0)
        free = sorted(free + [places[span.row] for span in spans if last[span.row] == i])
    return places


def experiments(rows: Sequence[Row]) -> "Figure":
    """Throughput, first tokens and worst gaps of every variant of every experiment."""
    made, panels = figure(12, 0.34 * len(rows) + 1.2, 1, 3)
    names = [f"{row['experiment']}: {row['variant']}" for row in rows]
    columns = (
        ("output_tok_s", "tokens a second"),
        ("ttft_p99_ms", "TTFT, 99 %, ms"),
        ("worst_gap_ms", "worst gap, ms"),
    )
    for axes, (key, title) in zip(panels, columns, strict=True):
        kinds = list(dict.fromkeys(row["experiment"] for row in rows))
        colors = [COLORS[kinds.index(row["experiment"]) % len(COLORS)] for row in rows]
        axes.barh(range(len(rows)), [row[key] or 0.0 for row in rows], color=colors)
        axes.set(title=title, yticks=range(len(rows)), yticklabels=names if key == "output_tok_s" else [""] * len(rows))
        axes.invert_yaxis()
    return made
