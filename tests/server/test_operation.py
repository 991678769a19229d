"""`headrace serve` in operation: while it loads, while it ends, what it leaves behind, what it says."""

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest

from headrace.server.run import Exit
from helpers.server_process import COMPLETION, PROGRAM, Process, process
from helpers.tiny import save_t0

LONG = COMPLETION | {"max_tokens": 500, "ignore_eos": True, "stream": True}


def assert_gone(children: list[psutil.Process], started: Process) -> None:
    """Nothing is left of a server: no process, no file, no port."""
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert list(started.tmp.iterdir()) == []
    with socket.socket() as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        same.bind(("127.0.0.1", started.port))


@pytest.fixture(scope="module")
def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def test_from_loading_to_draining(t0_directory: Path, tmp_path: Path, shared_memory: set[str]) -> None:
    with process(tmp_path, t0_directory, "--scheduling-policy", "fcfs") as server:
        # While it loads.
        server.wait_for("/version")
        seen: list[int] = []
        while not seen or seen[-1] != 200:
            health, ready = server.get("/health"), server.get("/ready")
            seen.append(health.status_code)
            for answer in (health, ready, server.get("/v1/models"), server.post()):
                assert answer.status_code in (200, 503)
                if answer.status_code == 503:
                    assert answer.json()["error"]["code"] == "loading"
                    assert int(answer.headers["retry-after"]) >= 1
            time.sleep(0.02)
        assert seen[0] == 503, "it answers while it loads"
        assert server.post().status_code == 200
        assert list(server.tmp.iterdir()) == [], "the socket's directory is gone once both hold the connection"
        children = server.children()
        assert len(children) == 1
        # While it ends: the running stream goes on, others are refused.
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGTERM)
            server.wait_for("/ready", 503)
            assert server.get("/health").status_code == 200
            refused = server.post()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert 1 <= int(refused.headers["retry-after"]) <= 30
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        status, out, err = server.end()
        assert status == Exit.DONE
        assert_gone(children, server)
        assert set(os.listdir("/dev/shm")) <= shared_memory
    for word in ("T0", "LlamaForCausalLM", "float32", "kernels", "KV cache", "context 512", server.url):
        assert word in out
    assert "Traceback" not in err


def test_a_second_signal_cuts_answers_off(t0_directory: Path, tmp_path: Path) -> None:
    with process(tmp_path, t0_directory) as server:
        server.wait_for("/ready")
        children = server.children()
        with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG | {"n": 64}, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.popen.send_signal(signal.SIGINT)
            server.wait_for("/ready", 503)
            server.popen.send_signal(signal.SIGINT)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert rest[-1] == "data: [DONE]"
        status, _, err = server.end()
        assert status == Exit.CUT_OFF
        assert_gone(children, server)
    assert "Traceback" not in err


@pytest.mark.parametrize(("number", "after"), [(signal.SIGTERM, 0.0), (signal.SIGINT, 1.0)])
def test_a_signal_while_it_loads(t0_directory: Path, tmp_path: Path, number: signal.Signals, after: float) -> None:
    with process(tmp_path, t0_directory) as server:
        server.wait_for("/version")
        time.sleep(after)
        children = server.children()
        server.popen.send_signal(number)
        status, _, err = server.end()
        assert status == Exit.DONE
        assert_gone(children, server)
    assert "Traceback" not in err


@pytest.mark.parametrize("moment", ["loading", "stream"])
def test_the_engine_does_not_outlive_its_parent(t0_directory: Path, tmp_path: Path, moment: str) -> None:
    with process(tmp_path, t0_directory) as server:
        server.wait_for("/version" if moment == "loading" else "/ready")
        children = server.children()
        if moment == "stream":
            with httpx.stream("POST", f"{server.url}/v1/completions", json=LONG, timeout=60) as stream:
                next(stream.iter_lines())
                server.popen.kill()
        else:
            server.popen.kill()
        server.end()
        assert_gone(children, server)


def test_an_engine_that_dies_ends_the_server(t0_directory: Path, tmp_path: Path) -> None:
    with process(tmp_path, t0_directory) as server:
        server.wait_for("/ready")
        [engine] = server.children()
        engine.kill()
        status, _, err = server.end()
        assert status == Exit.ENGINE_DIED
        assert_gone([engine], server)
    assert "the engine process was killed by SIGKILL" in err
    assert "Traceback" not in err


def test_an_engine_that_dies_while_it_loads(t0_directory: Path, tmp_path: Path) -> None:
    with process(tmp_path, t0_directory) as server:
        server.wait_for("/version")
        while not (children := server.children()):
            time.sleep(0.01)
        children[0].kill()
        status, _, err = server.end()
        assert status == Exit.ERROR
        assert_gone(children, server)
    assert err.splitlines()[-1] == "error: the engine process was killed by SIGKILL while it loaded the model"
    assert "Traceback" not in err


def test_the_machine_is_too_small(t0_directory: Path, tmp_path: Path) -> None:
    with process(tmp_path, t0_directory, "--kv-cache-memory", "1KiB") as server:
        status, _, err = server.end(60)
        assert_gone([], server)
    assert status == Exit.ERROR
    assert err.startswith("error: a context of 512 tokens needs")
    assert err.count("\n") == 1


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def test_a_unix_socket(t0_directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # a server has left it behind
    with process(tmp_path, t0_directory, "--uds", str(path), "--log-format", "json", "--enable-log-requests") as server:
        while not listens(path):
            assert server.popen.poll() is None
            time.sleep(0.02)
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            while client.get("/ready").status_code != 200:
                time.sleep(0.02)
            headers = {"x-request-id": "mine-1"}
            answer = client.post("/v1/completions", json=COMPLETION | {"prompt": "a secret"}, headers=headers)
            assert answer.status_code == 200
            assert answer.headers["x-request-id"] == "mine-1"
        in_use = subprocess.run([PROGRAM, "serve", "none", "--uds", path], capture_output=True, text=True, timeout=60)
        assert in_use.returncode == Exit.ERROR
        assert (
            in_use.stderr == f"error: {path} is in use: end the program that listens there, or choose another --uds\n"
        )
        server.popen.terminate()
        status, out, err = server.end()
    assert status == Exit.DONE
    assert not path.exists()
    assert f"curl --unix-socket {path} http://localhost/v1/chat/completions" in out
    records = [json.loads(line) for line in err.splitlines()]
    [record] = [r for r in records if r.get("request_id") == "mine-1"]
    assert "a secret" in record["message"], "it was asked for"
    assert {"time", "level", "logger", "message"} <= record.keys()


def test_what_clients_say_stays_out_of_the_log(t0_directory: Path, tmp_path: Path) -> None:
    with process(tmp_path, t0_directory, "--access-log") as server:
        server.wait_for("/ready")
        for body in ({"prompt": "hush"}, {"prompt": "hush", "hush": 1}, {"prompt": ["hush"], "max_tokens": "hush"}):
            server.post(**body)
        httpx.post(f"{server.url}/v1/completions", content=b"hush", headers={"content-type": "application/json"})
        server.get("/v1/models/hush%0aline?hush=hush")
        server.popen.terminate()
        _, out, err = server.end()
    access = [line for line in err.splitlines() if "/v1/" in line]
    assert len(access) == 5
    assert "POST /v1/completions 200 [req_" in err
    assert "GET /v1/models/hush%0aline 404 [req_" in err, "the path as it was sent"
    assert "hush" not in out + err.replace("hush%0aline", "")


def test_https(t0_directory: Path, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    with process(tmp_path, t0_directory, "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)) as server:
        context = ssl.create_default_context(cafile=str(certificate))
        with httpx.Client(verify=context, base_url=server.url.replace("http:", "https:"), timeout=60) as client:
            while True:
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.TransportError:
                    assert server.popen.poll() is None
                time.sleep(0.02)
            assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        server.popen.terminate()
        status, out, _ = server.end()
    assert status == Exit.DONE
    assert f"https://127.0.0.1:{server.port}/v1" in out
    with process(tmp_path, t0_directory, "--ssl-certfile", str(key), "--ssl-keyfile", str(key)) as server:
        status, _, err = server.end()
    assert status == Exit.ERROR
    assert err.startswith(f"error: {key} and {key} are not a certificate and its key")
    assert err.count("\n") == 1


def test_a_template_without_end_holds_up_nobody(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    model = save_t0(tmp_path / "T0", chat_template="{% if messages|length > 1 %}" + endless + "{% endif %}fine")
    with process(tmp_path, model) as server:
        server.wait_for("/ready")
        chat = {"model": "T0", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
        answers: list[httpx.Response] = []

        def post() -> None:
            body = chat | {"messages": [{"role": "user", "content": "Hi"}] * 2}
            answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60))

        thread = threading.Thread(target=post)
        thread.start()
        others = 0
        while thread.is_alive():
            assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
            others += 1
        assert others > 1
        assert answers[0].status_code == 400
        assert "chat template" in answers[0].json()["error"]["message"]
