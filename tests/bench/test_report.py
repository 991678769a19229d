"""Pages of saved results, and the comparison's own arithmetic."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from headrace.bench import report
from headrace.bench.results import Result
from headrace.cli.main import main
from headrace.errors import ConfigError

ROOT = Path(__file__).parents[2]
LATENCY = {
    "batch": 1, "input_len": 128, "ttft_ms": 10.0, "tpot_ms": 2.0, "decode_tok_s": 500.0,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two results, in the wrong order."""
    folder = tmp_path / "results"
    Result(benchmark="zebra", title="Stripes <b>", note="With `--code` & more.", rows=[{"x_ms": 1.5}],
           command="python bench/zebra.py").save(folder / "a.json")  # fmt: skip
    Result(benchmark="latency", title="Latency", rows=[LATENCY, LATENCY | {"batch": 8}],
           command="headrace bench latency default").save(folder / "b.json")  # fmt: skip
    return folder


def test_a_page_in_markdown(saved: Path, tmp_path: Path) -> None:
    assert main(["bench", "report", str(saved), "--output", str(tmp_path / "x.md")]) == 0
    page = (tmp_path / "x.md").read_text()
    assert page.index("## Latency") < page.index("## Stripes")  # the known ones first
    assert "| x, ms |\n| --- |\n| 1.5 |" in page
    assert "<!-- not run: it is the benchmark itself -->\n```bash\npython bench/zebra.py\n```" in page
    assert "headrace 0." in page


def test_a_page_in_html_and_a_picture(saved: Path, tmp_path: Path) -> None:
    assert (
        main(["bench", "report", str(saved / "a.json"), str(saved / "b.json"), "--output", str(tmp_path / "x.html")])
        == 0
    )
    page = (tmp_path / "x.html").read_text()
    assert "Stripes &lt;b&gt;" in page
    assert "With <code>--code</code> &amp; more." in page
    assert "<tr><td>1.5</table>" in page
    assert page.count("data:image/png;base64,") == 1
    assert main(["bench", "report", str(saved), "--output", str(tmp_path / "x.png")]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be(saved: Path, tmp_path: Path) -> None:
    results = report.load([str(saved)])
    for path, message in (("x.pdf", r"a report is a \.md"), (str(tmp_path / "no" / "x.md"), "cannot be written")):
        with pytest.raises(ConfigError, match=message):
            report.write(results, path)
    with pytest.raises(ConfigError, match="none of them is there"):
        report.write(results[1:], "x.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there are no results"):
        report.load([str(tmp_path / "empty")])


def test_the_page_of_the_documentation_is_made_of_the_saved_results() -> None:
    """So nothing in it is typed by hand: `headrace bench report bench/results --output docs/performance.md`."""
    assert report.as_page(report.load([str(ROOT / "bench" / "results")])) == (ROOT / "docs/performance.md").read_text()


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "compare"))
    for name in ("compare", "environments"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import compare

    return compare


def test_ratios_say_how_much_better_we_are(compare: ModuleType) -> None:
    names = ["headrace", "a", "b"]
    row = compare.row_of(
        "decode", "tokens/s", {"headrace": [3, 9, 4], "a": [1, 2, 3], "b": [1]}, names, more_is_better=True
    )
    assert row == {
        "what": "decode", "unit": "tokens/s", "headrace": "4 (3 to 9)", "a": "2 (1 to 3)", "b": "1", "ratio": 2.0,
    }  # fmt: skip
    assert (
        compare.row_of("start", "s", {"headrace": [2], "a": [3], "b": [5]}, names, more_is_better=False)["ratio"] == 1.5
    )
    alone = compare.row_of("x", "", {"headrace": [2]}, names, more_is_better=True)
    assert (alone["ratio"], alone["a"]) == (None, None)


def test_a_context_that_holds_all_cells(compare: ModuleType) -> None:
    found = compare.sizes(["prefill2048", "decode8", "decode32@100"])
    assert found == {"max_num_seqs": 32, "max_model_len": 2048 + compare.DECODED + 2}


def test_the_runner_of_headrace_answers(compare: ModuleType, t0_directory: Path, tmp_path: Path) -> None:
    """Through the protocol, as any peer: tokens are made and scored, and its end is told with a reason."""
    settings = {"model": str(t0_directory), "threads": 1, "max_model_len": 64, "max_num_seqs": 2}
    peer = compare.Process("headrace", compare.PEERS["headrace"], settings)
    assert peer.ask(run=[[1, 2, 3], [4, 5, 6]], output_len=4)["seconds"] > 0
    logprobs = peer.ask(score=[1, 2, 3, 4])["logprobs"]
    assert len(logprobs) == 3
    assert max(logprobs) < 0
    assert peer.memory() > 50e6
    with pytest.raises(compare.Missing, match=r"ended: .*RequestError.*tokens and the context holds 64"):
        peer.ask(run=[[1] * 70], output_len=1)


def test_a_peer_that_is_not_there_is_missing(compare: ModuleType) -> None:
    nowhere = compare.PeerPlan(engine="nowhere")
    with pytest.raises(compare.Missing, match=r"ended: .*run_nowhere\.py"):
        compare.Process("nowhere", nowhere, {"model": "x", "threads": 1})


def test_perplexity_of_a_text_in_windows(compare: ModuleType) -> None:
    asked: list[list[int]] = []

    class Peer:
        def ask(self, score: list[int]) -> dict[str, list[float]]:
            asked.append(score)
            return json.loads(json.dumps({"logprobs": [-2.0] * (len(score) - 1)}))

    assert compare.perplexity(Peer(), list(range(1026))) == pytest.approx(2.718281828**2)
    assert [len(part) for part in asked] == [512, 512, 2]
