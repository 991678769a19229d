"""`headrace serve`: an OpenAI-compatible server."""

import argparse
from typing import Any

from headrace.cli.settings import add_engine_flags, add_flags, engine_and_server_config
from headrace.server.config import ServerConfig

DESCRIPTION = """\
Serves a model over HTTP with OpenAI's API: /v1/chat/completions, /v1/completions,
/v1/models, and /health, /ready, /version, /metrics, /docs. Any OpenAI client
works with it.

MODEL is a Hugging Face directory, a GGUF file, org/name on the Hugging Face hub,
or "default" (as without MODEL). The server listens at once, and says when the
model is loaded. Ctrl-C or SIGTERM ends it when the running requests have
finished; a second one ends it at once."""

EXAMPLES = """\
examples:
  headrace serve
  headrace serve ./Llama-3.2-1B-Instruct --port 9000 --max-model-len 4096
  headrace serve ./model.gguf --served-model-name assistant --host 0.0.0.0
  headrace serve --api-key-file keys.yaml --ssl-certfile server.pem --ssl-keyfile server.key
  headrace serve --config server.yaml

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "assistant", "messages": [{"role": "user", "content": "Hello"}]}'

a config file:
  model: ./Llama-3.2-1B-Instruct
  engine_config: {max_model_len: 4096, max_num_seqs: 16}
  server_config: {port: 9000, served_model_name: assistant}

exit status:
  0    ended by Ctrl-C or SIGTERM, and every answer was finished
  1    the model, the settings or the machine do not allow it; stderr says what and why
  2    the command line is wrong
  3    the engine process died
  4    ended by Ctrl-C or SIGTERM, and answers were cut off

environment:
  HEADRACE_API_KEY   an API key, or several separated by commas"""


def add_to(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve",
        usage="headrace serve [MODEL] [flags]",
        help="serve a model with OpenAI's API",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help="what to serve")
    add_flags(parser, "server settings", ServerConfig)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine_config, server_config = engine_and_server_config(args)

    from headrace import logs
    from headrace.server.run import bind, serve

    logs.configure(server_config.log_format)
    listener = bind(server_config)  # before the model is loaded: a taken port is told at once
    return serve(engine_config, server_config, listener)
