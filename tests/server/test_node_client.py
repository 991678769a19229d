"""The official client for Node, unchanged. It comes from npm once, into the user's cache; without it, no test."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers.http_server import RunningServer, t0_greedy, t0_text

VERSION = "6"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "headrace" / f"openai-node-{VERSION}"

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2] + "/v1", apiKey: "unused", maxRetries: 0});
const out = {};
out.models = (await client.models.list()).data.map(model => model.id);
const prompt = {model: "T0", prompt: "abc", max_tokens: 12, temperature: 0, ignore_eos: true};
const whole = await client.completions.create(prompt);
out.text = whole.choices[0].text;
out.usage = whole.usage;
out.streamed = "";
for await (const chunk of await client.completions.create({...prompt, stream: true})) {
  out.streamed += chunk.choices[0].text;
}
const messages = [{role: "user", content: [{type: "text", text: "Hi"}]}];
const chat = {model: "T0", messages, max_completion_tokens: 9, temperature: 0, ignore_eos: true};
out.chat = (await client.chat.completions.create(chat)).choices[0].message;
out.deltas = [];
const options = {stream: true, stream_options: {include_usage: true}};
for await (const chunk of await client.chat.completions.create({...chat, ...options})) out.deltas.push(chunk);
const runner = client.chat.completions.stream(chat);
out.final = await runner.finalContent();
try { await client.completions.create({...prompt, temperature: 9}); }
catch (error) { out.error = {name: error.constructor.name, status: error.status, param: error.param}; }
const controller = new AbortController();
const endless = {...prompt, max_tokens: 500, stream: true};
let pieces = 0;
for await (const chunk of await client.completions.create(endless, {signal: controller.signal})) {
  pieces += 1;
  if (pieces == 3) controller.abort();
}
out.pieces = pieces;
console.log(JSON.stringify(out));
"""


@pytest.fixture(scope="module")
def directory() -> Path:
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no Node here")
    if not (CACHE / "node_modules" / "openai").exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", CACHE, f"openai@{VERSION}"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        except (subprocess.SubprocessError, OSError):
            pytest.skip("npm does not get the client")
    return CACHE


def test_the_node_client(server: RunningServer, directory: Path) -> None:
    # A script without a file finds modules from the current directory on.
    run = subprocess.run(
        ["node", "--input-type=module", "-", server.url],
        input=SCRIPT, cwd=directory, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    out = json.loads(run.stdout)
    assert out["models"] == ["T0"]
    assert out["text"] == out["streamed"] == t0_text(t0_greedy([*b"abc"], 12))
    assert (out["usage"]["prompt_tokens"], out["usage"]["completion_tokens"]) == (3, 12)
    reply = t0_text(t0_greedy([256, *b"user:Hi", 257, 256, *b"assistant:"], 9))
    assert out["chat"] == {"role": "assistant", "content": reply, "refusal": None}
    *chunks, last = out["deltas"]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == reply
    assert last["usage"]["completion_tokens"] == 9
    assert out["final"] == reply
    assert out["error"] == {"name": "BadRequestError", "status": 400, "param": "temperature"}
    assert out["pieces"] < 500
    server.wait_until_idle(5)
