"""Pages made of saved results: Markdown, and HTML with pictures. Nothing in them is typed by hand."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.bench.results import Result, Row, as_markdown, machine_line
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INTRODUCTION = (
    "This page is made from the results in `bench/results` by `headrace bench report`. Each table is one run on one "
    "machine, with the command that gave it; only ratios carry over to other machines."
)
# In which order benchmarks stand on a page; others follow by name.
ORDER = (
    "compare",
    "compare_served",
    "limits",
    "latency",
    "throughput",
    "serve",
    "sweep",
    "startup",
    "kernels",
    "fit",
    "simulate",
)


def load(paths: Sequence[str]) -> list[Result]:
    """The results in some files, and in the folders among them, in the order of the page."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"there are no results (.json) in {', '.join(paths)}")
    found = [Result.load(file) for file in files]
    place = {name: i for i, name in enumerate(ORDER)}
    return sorted(found, key=lambda r: (place.get(r.benchmark, len(ORDER)), r.benchmark, r.title))


def as_page(results: Sequence[Result]) -> str:
    """A page in Markdown."""
    parts = ["# Performance", INTRODUCTION]
    for result in results:
        command = f"<!-- not run: it is the benchmark itself -->\n```bash\n{result.command}\n```"
        parts += [f"## {result.title}", result.note, as_markdown(result.rows), command, _where(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _where(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{machine_line(result.machine)}. {versions}. {result.date.partition('T')[0]}."


def as_html(results: Sequence[Result]) -> str:
    """One page with everything in it, pictures too."""
    body = [f"<h1>Performance</h1><p>{_text(INTRODUCTION)}</p>"]
    for result in results:
        body.append(f"<h2>{_text(result.title)}</h2><p>{_text(result.note)}</p>")
        body.append(_table(result.rows))
        body += map(_image, pictures([result]))
        body.append(f"<pre>{html.escape(result.command)}</pre><p class=where>{html.escape(_where(result))}</p>")
    return PAGE.format(body="\n".join(body))


def _table(rows: Sequence[Row]) -> str:
    """From the Markdown, so that both pages say the same."""
    lines = [line.strip("| ").split(" | ") for line in as_markdown(rows).splitlines()]
    if not lines:
        return ""
    head = "".join(f"<th>{_text(cell)}" for cell in lines[0])
    return f"<table><tr>{head}" + "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}" for cell in line) for line in lines[2:]
    ) + "</table>"  # fmt: skip


def _text(text: str) -> str:
    """HTML of a text in which `code` is marked."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if i % 2 else piece for i, piece in enumerate(pieces))


def _image(figure: "Figure") -> str:
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def pictures(results: Sequence[Result]) -> "list[Figure]":
    """Of those results that have some."""
    from headrace.bench import plots

    draw = {"latency": plots.latency, "sweep": plots.sweep, "simulate": plots.experiments}
    return [draw[result.benchmark](result.rows) for result in results if result.benchmark in draw]


def write(results: Sequence[Result], path: str) -> None:
    """A .md page, a .html page with pictures, or the pictures alone as a .png. Raises ConfigError for other names."""
    suffix = Path(path).suffix
    if suffix == ".png":
        from headrace.bench import plots

        made = pictures(results)
        if not made:
            raise ConfigError("only results of latency, sweep and simulate have pictures, and none of them is there")
        plots.save_below_each_other(made, path)
        return
    if suffix not in (".md", ".html"):
        raise ConfigError(f"{path}: a report is a .md, .html or .png file")
    try:
        Path(path).write_text(as_page(results) if suffix == ".md" else as_html(results), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


PAGE = """<!doctype html>
<meta charset="utf-8"><title>Performance</title>
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} th, td {{ padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child {{ text-align: left }} img {{ max-width: 100% }} .where {{ color: #666 }}
pre {{ background: #f4f4f4; padding: .6em }}
</style>
{body}
"""
