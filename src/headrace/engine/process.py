"""The engine process: loads a model, then takes requests from a socket and sends back what each step brings.

It is started by `AsyncEngine` as `python -m headrace.engine.process SOCKET`, and does not outlive its parent: its stdin
is a pipe whose other end only the parent holds.
"""

import os
import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from headrace import logs
from headrace.engine.messages import Abort, Failed, Load, Loaded, Stop, Submit, Turn, encode, to_engine
from headrace.errors import HeadraceError, OverloadedError, RequestError

if TYPE_CHECKING:
    from headrace.engine.core import Engine


def main(path: Path, log_format: str) -> None:
    """Runs the engine until it is told to stop. path: of the socket on which the parent listens."""
    threading.Thread(target=_end_with_parent, args=(path.parent,), daemon=True).start()
    logs.configure(log_format)
    from headrace.engine.core import Engine  # it takes seconds, in which the parent opens the model

    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        # The parent always reads, whatever its clients do. Were it stuck, the engine would wait for it here.
        socket.connect(f"ipc://{path}")
        first = to_engine(socket.recv())
        shutil.rmtree(path.parent, ignore_errors=True)  # both hold the connection now, and nothing is left behind
        if not isinstance(first, Load):
            return
        try:
            engine = Engine(first.config)
        except HeadraceError as error:
            socket.send(encode(Failed(error)))
            return
        socket.send(encode(Loaded(engine.info, engine.stats())))
        serve(engine, socket)


def serve(engine: "Engine", socket: "zmq.Socket[bytes]") -> None:
    """The step loop. Messages are worked off between two steps; without work, it sleeps until one comes."""
    told = engine.stats()
    while True:
        accepted: list[str] = []
        refused: dict[str, HeadraceError] = {}
        while socket.poll(0 if engine.has_work or accepted or refused else None):
            message = to_engine(socket.recv())
            match message:
                case Submit(request):
                    try:
                        engine.add_request(request)
                        accepted.append(request.request_id)
                    except (RequestError, OverloadedError) as error:
                        refused[request.request_id] = error
                case Abort(request_id):
                    engine.abort(request_id)
                    break  # so that the parent hears of it, even if that was the last work
                case Stop():
                    return
        if accepted or refused:
            socket.send(encode(Turn(engine.stats(), accepted, refused)))
        deltas = engine.step() if engine.has_work else []
        stats = engine.stats()
        if deltas or stats != told:
            told = stats
            socket.send(encode(Turn(stats, deltas=deltas)))


def _end_with_parent(directory: Path) -> None:
    """Ends this process at once when its parent has ended, in whatever way."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
