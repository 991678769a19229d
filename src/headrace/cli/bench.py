"""`headrace bench`: measurements of the engine, of servers and of the machine."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from headrace.bench.datasets import DatasetSettings
from headrace.bench.kernels import KernelSettings
from headrace.bench.latency import LatencySettings
from headrace.bench.load_settings import ServeSettings, SweepSettings
from headrace.bench.results import Result, as_text, check_output
from headrace.bench.simulate_settings import EngineSettings, SimulateSettings
from headrace.cli.settings import add_engine_flags, add_flags, engine_and_server_config, given
from headrace.errors import ConfigError

DESCRIPTION = """\
Measures, prints a table, and saves it with everything that is needed to judge and
to repeat it: the machine, versions, settings, the command and the date."""

EXAMPLES = """\
examples:
  headrace bench limits
  headrace bench latency default --batch-size 1,8,32 --input-len 128 --output-json latency.json
  headrace bench throughput default --dataset-name sharegpt --num-prompts 100
  headrace bench serve --base-url http://127.0.0.1:8000 --request-rate 2 --goodput ttft:500 tpot:100
  headrace bench sweep --base-url http://127.0.0.1:8000 --dataset-name sharegpt --plot sweep.png
  headrace bench startup default -- --max-model-len 2048
  headrace bench kernels --shapes 1536x576 --rows 1,32
  headrace bench simulate --experiment chunking --plot chunking.png
  headrace bench report bench/results --output report.html

exit status:
  0 all went well, 1 an error, 2 a wrong command line, 130 interrupted by Ctrl-C

'headrace bench MEASUREMENT --help' tells everything about a measurement."""

Run = Callable[[argparse.Namespace], Result]


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        usage="headrace bench MEASUREMENT [arguments]",
        help="measure speed: of the engine, of servers, of this machine",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    kinds = parser.add_subparsers(title="measurements", metavar="MEASUREMENT", required=True, prog="headrace bench")

    one = _add(kinds, "limits", "what this machine can do at best: reading memory, multiplying", _limits)
    _add_threads(one)
    _add_rounds(one, 5)

    one = _add(kinds, "latency", "a number of sequences alone on the engine: first token, time per token", _latency)
    _add_model(one)
    add_flags(one, "what is measured", LatencySettings)
    add_engine_flags(one)

    one = _add(kinds, "throughput", "tokens a second when all requests are there at once", _throughput)
    _add_model(one)
    add_flags(one, "requests", DatasetSettings)
    _add_rounds(one, 1)
    add_engine_flags(one)

    one = _add(kinds, "serve", "a server under load, as its clients see it; any that speaks OpenAI's API", _serve)
    _add_load(one, [f.name for f in fields(ServeSettings) if f.name != "goodput"])
    add_flags(one, "requests", DatasetSettings)

    one = _add(kinds, "sweep", "a server under more and more load, until it cannot keep up", _sweep)
    add_flags(one, "loads", SweepSettings)
    rates = ("goodput", "request_rate", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    _add_load(one, [f.name for f in fields(ServeSettings) if f.name not in rates])
    add_flags(one, "requests", DatasetSettings, [f.name for f in fields(DatasetSettings) if f.name != "num_prompts"])
    _add_plot(one)

    one = _add(
        kinds, "startup", "from the start of 'headrace serve' to the first token; memory", _startup, rest="flags"
    )
    _add_model(one)
    one.add_argument("flags", metavar="FLAG", nargs="*", help="flags of 'headrace serve', after --")
    _add_rounds(one, 3)

    one = _add(kinds, "kernels", "single ops of a backend, in the shapes of models", _kernels)
    add_flags(one, "what is measured", KernelSettings)
    _add_threads(one)

    one = _add(kinds, "simulate", "the scheduler and the cache in simulation: ideas with and without", _simulate)
    add_flags(one, "what is simulated", SimulateSettings)
    add_flags(one, "engine of a load", EngineSettings)
    add_flags(one, "requests of a load", DatasetSettings)
    _add_plot(one)
    one.add_argument("--timeline", metavar="FILE", help="draw which request runs when, static and continuous")

    one = _add(kinds, "fit", "what a step costs on this machine, for simulations; checked against real runs", _fit)
    _add_model(one)
    _add_rounds(one, 2)
    add_engine_flags(one)

    one = kinds.add_parser(
        "report",
        help="a page made of saved results",
        description="Makes a page of saved results: Markdown, HTML with pictures, or the pictures alone.",
    )
    one.add_argument("results", metavar="RESULT", nargs="+", help=".json files, or folders of them")
    one.add_argument("--output", metavar="FILE", required=True, help="a .md, .html or .png file")
    one.set_defaults(run=_report)


def _add(kinds: Any, name: str, help: str, run: Run, **kwargs: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=f"Measures: {help}.", **kwargs)
    results = parser.add_argument_group("results")
    results.add_argument("--output-json", metavar="FILE", help="save the table, and how it came to be")
    results.add_argument("--output-csv", metavar="FILE", help="save the table alone")
    parser.set_defaults(run=lambda args: _run(args, run))
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    help = 'a directory, a GGUF file, org/name, or "default"'
    parser.add_argument("model", metavar="MODEL", nargs="?", default="default", help=help)


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", metavar="N", type=int, help="CPU threads (default: as the engine would take)")


def _add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--rounds", metavar="N", type=int, default=default, help=f"timed rounds (default: {default})")


def _add_load(parser: argparse.ArgumentParser, names: list[str]) -> None:
    add_flags(parser, "load", ServeSettings, names)
    help = "what a good answer keeps to, in milliseconds, as ttft:200 tpot:50; also itl (its worst) and e2el"
    parser.add_argument("--goodput", metavar="KEY:MS", nargs="+", default=[], help=help)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="FILE", help="draw a picture: .png, .svg or .pdf; needs matplotlib")


def _run(args: argparse.Namespace, run: Run) -> int:
    for path in (args.output_json, args.output_csv):
        if path is not None:
            check_output(path)
    for name in ("rounds", "threads"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    result = run(args)
    print(as_text(result.rows))
    for text in result.details.get("warnings", ()):
        print(f"warning: {text}", file=sys.stderr)
    for path in (args.output_json, args.output_csv):
        if path is not None:
            result.save(path)
    return 0


def _threads(args: argparse.Namespace) -> int:
    if args.threads is not None:
        return int(args.threads)
    import torch

    from headrace.worker.memory import available_cpus

    return min(torch.get_num_threads(), available_cpus())


def _limits(args: argparse.Namespace) -> Result:
    from headrace.bench import limits

    return limits.run(_threads(args), args.rounds)


def _latency(args: argparse.Namespace) -> Result:
    from headrace.bench import latency

    return latency.run(engine_and_server_config(args)[0], LatencySettings(**given(args, LatencySettings)))


def _throughput(args: argparse.Namespace) -> Result:
    from headrace.bench import throughput

    dataset = DatasetSettings(**given(args, DatasetSettings))
    return throughput.run(engine_and_server_config(args)[0], dataset, args.rounds)


def _load(args: argparse.Namespace) -> ServeSettings:
    return ServeSettings(**given(args, ServeSettings) | {"goodput": " ".join(args.goodput) or None})


def _serve(args: argparse.Namespace) -> Result:
    from headrace.bench import serve

    return serve.run(_load(args), DatasetSettings(**given(args, DatasetSettings)))


def _sweep(args: argparse.Namespace) -> Result:
    from headrace.bench import plots, sweep

    settings = SweepSettings(**given(args, SweepSettings))
    result = sweep.run(_load(args), DatasetSettings(**given(args, DatasetSettings)), settings)
    if args.plot is not None:
        plots.save(plots.sweep(result.rows), args.plot)
    return result


def _startup(args: argparse.Namespace) -> Result:
    from headrace.bench import startup

    return startup.run(args.model, args.flags, args.rounds)


def _kernels(args: argparse.Namespace) -> Result:
    from headrace.bench import kernels

    return kernels.run(KernelSettings(**given(args, KernelSettings)), _threads(args))


def _simulate(args: argparse.Namespace) -> Result:
    from headrace.bench import plots, simulate

    settings = SimulateSettings(**given(args, SimulateSettings))
    engine, dataset = EngineSettings(**given(args, EngineSettings)), DatasetSettings(**given(args, DatasetSettings))
    if settings.experiment != "load" and (given(args, EngineSettings) or given(args, DatasetSettings)):
        raise ConfigError("flags of engine and requests are for a load: give --experiment load")
    result = simulate.run(settings, engine, dataset)
    if args.plot is not None:
        plots.save(plots.experiments(result.rows), args.plot)
    if args.timeline is not None:
        plots.save(plots.timeline(simulate.timeline(simulate.cost_of(settings))), args.timeline)
    return result


def _fit(args: argparse.Namespace) -> Result:
    from headrace.bench import fit

    return fit.run(engine_and_server_config(args)[0], args.rounds)


def _report(args: argparse.Namespace) -> int:
    from headrace.bench import report

    report.write(report.load(args.results), args.output)
    return 0
