"""The report of a quantization as a page: a plot of each matrix's error by layer, and a table. No libraries needed."""

import html
import math
import re
from collections.abc import Sequence
from pathlib import Path

from headrace.formats.hf_writer import write_text
from headrace.quantize.layer_run import STAGES
from headrace.quantize.quantizer import MatrixReport

WIDTH, HEIGHT, MARGIN = 760, 320, 50
COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")


def write_report(path: Path, title: str, reports: Sequence[MatrixReport], measured: str) -> None:
    """measured: of what the errors are a share."""
    rows = "\n".join(
        f"<tr><td>{html.escape(r.name.removesuffix('.weight'))}</td><td>{r.bits}</td><td>{r.group_size}</td>"
        f"<td>{r.error:.3e}</td></tr>"
        for r in reports
    )
    write_text(
        path,
        f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body {{ font: 14px sans-serif; margin: 2em; }} td, th {{ padding: 2px 12px; text-align: left; }}</style></head>
<body><h1>{html.escape(title)}</h1>
<p>Squared error of each matrix, as a share of {html.escape(measured)}, by layer (logarithmic).</p>
{_plot(reports)}
<table><tr><th>matrix</th><th>bits</th><th>group size</th><th>error</th></tr>
{rows}
</table></body></html>
""",
    )


def _plot(reports: Sequence[MatrixReport]) -> str:
    kinds = [name for stage in STAGES for name in stage]
    points = []
    for r in reports:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", r.name)
        if match and r.error > 0:
            points.append((int(match[1]), kinds.index(match[2]), math.log10(r.error), r.name))
    if not points:
        return "<p>No matrix has an error.</p>"
    layers = max(p[0] for p in points) or 1
    low, high = math.floor(min(p[2] for p in points)), math.ceil(max(p[2] for p in points))

    def x(layer: int) -> float:
        return MARGIN + layer / layers * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (value - low) / max(high - low, 1) * (HEIGHT - 2 * MARGIN)

    lines = [
        f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y(e):.1f}" y2="{y(e):.1f}" stroke="#ddd"/>'
        f'<text x="4" y="{y(e) + 4:.1f}">1e{e}</text>'
        for e in range(low, high + 1)
    ]
    lines += [
        f'<text x="{x(layer):.1f}" y="{HEIGHT - 28}" text-anchor="middle">{layer}</text>'
        for layer in range(0, layers + 1, max(1, layers // 10))
    ]
    lines += [
        f'<circle cx="{x(layer):.1f}" cy="{y(value):.1f}" r="4" fill="{COLORS[kind]}"><title>{name}: {10**value:.3e}'
        f"</title></circle>"
        for layer, kind, value, name in points
    ]
    step = (WIDTH - 2 * MARGIN) / len(kinds)
    lines += [
        f'<text x="{MARGIN + i * step:.1f}" y="16" fill="{COLORS[i]}">{kind.split(".")[1]}</text>'
        for i, kind in enumerate(kinds)
    ]
    return f'<svg width="{WIDTH}" height="{HEIGHT}" font-size="12">{"".join(lines)}</svg>'
