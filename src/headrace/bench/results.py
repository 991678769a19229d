"""The one form in which every measurement is saved: a table, and all that is needed to judge and repeat it."""

import csv
import dataclasses
import io
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import headrace
from headrace.errors import ConfigError

FORMAT = 1
WIDEST_ROW = 12  # columns of a table with one row
Row = dict[str, Any]
PACKAGES = ("torch", "numpy", "tokenizers", "transformers")
# Endings of column names that are units, and how they are written.
UNITS = {
    "tok_s": "tokens/s", "req_s": "requests/s", "gb_s": "GB/s", "gop_s": "Gop/s", "ms": "ms", "us": "us", "s": "s",
    "mb": "MB", "share": "share of the limit", "percent": "%",
}  # fmt: skip


@dataclass(kw_only=True)
class Result:
    """What a benchmark has found.

    benchmark: its name, such as "latency". title, note: for the reader of the report.
    rows: the table; all rows have the same keys, which end in the unit where there is one (`ttft_ms`).
    settings: what was measured with. details: whatever else is worth keeping, such as the single rounds.
    command: what gave it, with which it can be repeated. machine, versions, date: where, with what and when.
    """

    benchmark: str
    title: str
    note: str = ""
    rows: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    command: str = field(default_factory=lambda: command_line(sys.argv))
    machine: dict[str, Any] = field(default_factory=lambda: machine())
    versions: dict[str, str] = field(default_factory=lambda: versions())
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def save(self, path: str | Path) -> None:
        """Writes everything to a .json file, or the table alone to a .csv file. Raises ConfigError if it cannot."""
        path = Path(path)
        if path.suffix == ".json":
            text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"
        else:
            text = as_csv(self.rows)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None

    @classmethod
    def load(cls, path: str | Path) -> "Result":
        """Raises ConfigError for a file that is no saved result."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from None
        names = {f.name for f in dataclasses.fields(cls)}
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT or set(found) != names:
            raise ConfigError(f"{path} is not a result that this version of Headrace has saved")
        return cls(**found)


def check_output(path: str) -> None:
    """Raises ConfigError for a file name that `save` does not know, before anything is measured."""
    if Path(path).suffix not in (".json", ".csv"):
        raise ConfigError(f"{path}: results are written to .json files, or their tables to .csv files")


def as_csv(rows: Sequence[Row]) -> str:
    """A range becomes two columns, `..._low` and `..._high`."""
    rows = [dict(pair for name, value in row.items() for pair in _columns(name, value)) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(name: str, value: Any) -> list[tuple[str, Any]]:
    return (
        list(zip((f"{name}_low", f"{name}_high"), value, strict=True)) if isinstance(value, list) else [(name, value)]
    )


def as_text(rows: Sequence[Row]) -> str:
    """A table for a terminal: numbers to the right, words to the left."""
    rows = _readable(rows)
    if not rows:
        return ""
    cells = [[_heading(name) for name in rows[0]], *([number(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_word = [all(isinstance(row[name], str) for row in rows) for name in rows[0]]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if word else cell.rjust(width)
            for cell, width, word in zip(line, widths, is_word, strict=True)
        ).rstrip()
        for line in cells
    )


def as_markdown(rows: Sequence[Row]) -> str:
    rows = _readable(rows)
    if not rows:
        return ""
    lines = [[_heading(name) for name in rows[0]], ["---"] * len(rows[0])]
    lines += [[number(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _readable(rows: Sequence[Row]) -> Sequence[Row]:
    """A single long row is turned into a column."""
    if len(rows) != 1 or len(rows[0]) <= WIDEST_ROW:
        return rows
    return [{"figure": _heading(name), "value": number(value)} for name, value in rows[0].items()]


def number(value: Any) -> str:
    """A figure with as many digits as are worth reading; a list of two as a range; None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, list):
        return " to ".join(map(number, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _heading(name: str) -> str:
    for ending, unit in UNITS.items():
        if name == ending:
            return unit
        if name.endswith("_" + ending):
            return f"{name.removesuffix('_' + ending).replace('_', ' ')}, {unit}"
    return name.replace("_", " ")


def command_line(words: Iterable[str]) -> str:
    """A command as a shell takes it, with the program's name only and without where results go."""
    program, *rest = words
    kept, skip = [], False
    for word in rest:
        if not skip and not word.startswith(("--output-json", "--output-csv")):
            kept.append(word)
        skip = word in ("--output-json", "--output-csv")
    name = Path(program).name
    return shlex.join([*(["python", program] if name.endswith(".py") else [name]), *kept])


def machine() -> dict[str, Any]:
    """What the figures depend on: processor, cores that this process may use, memory, system."""
    info: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                info.setdefault(name.strip(), value.strip())
    except OSError:  # not Linux, or not mounted
        pass
    flags = set(info.get("flags", "").split())
    return {
        "cpu": info.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [n for n in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8") if n in flags],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "virtual": "hypervisor" in flags,
        "system": f"{platform.system()} {platform.release()}",
    }


def machine_line(of: dict[str, Any]) -> str:
    kind = "virtual cores" if of["virtual"] else "cores"
    return (
        f"{of['cores']} {kind} of {of['cpu']} ({', '.join(of['instructions']) or 'no vector extensions known'}), "
        f"{of['memory_gb']:g} GB, {of['system']}"
    )


def versions() -> dict[str, str]:
    """Of Headrace, Python and the packages that make a difference, where they are installed."""
    found = {"headrace": headrace.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
