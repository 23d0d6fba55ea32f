"""The page and the Perfetto file: whole, safe with any name, and executed by a real browser."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import tpkernels.trace
from tests.trace.recordings import UNFRIENDLY, compute, operation, recording, sent, training_step
from tpkernels.trace.clock import SyncPoint
from tpkernels.trace.outputs import Outputs, write_all
from tpkernels.trace.page import page
from tpkernels.trace.perfetto import chrome_trace
from tpkernels.trace.summary import summarize
from tpkernels.trace.timeline import aligned

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome found")
LAYERS = 100
PACKAGE = Path(tpkernels.trace.__file__).parent


def page_of(recordings, world_size):
    timelines = aligned(recordings)
    return page(timelines, summarize(timelines, world_size))


def dom_of(path: Path, profile: Path) -> str:
    """The document after its scripts ran."""
    flags = "--headless --no-sandbox --disable-gpu --allow-file-access-from-files"
    done = subprocess.run(
        [
            str(BROWSER),
            *flags.split(),
            f"--user-data-dir={profile}",
            "--window-size=1200,900",
            "--virtual-time-budget=20000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return done.stdout


def result_of(dom: str):
    found = re.search(r'data-result="([^"]*)"', dom)
    assert found, dom[:2000]
    return json.loads(html.unescape(found[1]))


# What a frame shows: paths of the timeline by lane, rows of the table, and errors.
LOOK = """
function look(doc) {
  const root = doc.documentElement;
  return {
    ready: root.dataset.ready || "", errors: root.dataset.errors || "",
    cards: doc.querySelectorAll(".card").length,
    ranks: [...doc.querySelectorAll("#timeline .name")].map((each) => each.textContent),
    operations: doc.querySelectorAll("#timeline path.operation").length,
    compute: doc.querySelectorAll("#timeline path.compute").length,
    exposed: doc.querySelectorAll("#timeline path.exposed").length,
    communication: doc.querySelectorAll("#timeline path.communication").length,
    rows: doc.querySelectorAll("#rows tr").length,
    scripts: doc.querySelectorAll("script").length,
    warnings: doc.getElementById("warnings").textContent,
    meanings: doc.querySelectorAll("#meaning dt").length,
  };
}
"""


@needs_browser
def test_a_browser_builds_the_timeline_and_the_table(tmp_path):
    """1 to 8 ranks of 100 layers, one frame each, in one browser."""
    worlds = range(1, 9)
    steps = {
        world: [training_step(rank, world, LAYERS) for rank in range(world)] for world in worlds
    }
    for world in worlds:
        (tmp_path / f"{world}.html").write_text(page_of(steps[world], world))
    frames = "".join(f'<iframe src="{w}.html" width="1100" height="700"></iframe>' for w in worlds)
    index = tmp_path / "index.html"
    index.write_text(
        f"<!DOCTYPE html><html><body>{frames}<script>{LOOK}"
        "addEventListener('load', () => { document.documentElement.dataset.result = JSON.stringify("
        "[...document.querySelectorAll('iframe')].map((each) => look(each.contentDocument))); });"
        "</script></body></html>"
    )
    for world, found in zip(worlds, result_of(dom_of(index, tmp_path / "p")), strict=True):
        assert found["ready"] == "yes" and found["errors"] == ""
        assert found["ranks"] == [f"rank {rank}" for rank in range(world)]
        assert found["cards"] == world
        # One path a row and style, whatever the number of intervals.
        assert found["operations"] == 2 * world
        assert found["compute"] == world and found["exposed"] == world
        assert world <= found["communication"] <= 5 * world
        assert found["rows"] == 2 * LAYERS
        assert found["scripts"] == 2  # a name did not become one
        assert found["warnings"] == "" and found["meanings"] > 10


DRIVE = """
addEventListener("load", () => {
  const svg = document.getElementById("timeline");
  const seen = {};
  const text = (css) => document.querySelector(css).textContent;
  const press = (key) => svg.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const span = () => { draw(); return view.end - view.begin; };
  press("0");
  const whole = span();
  press("ArrowDown"); press("ArrowDown"); press("n");
  seen.spoken = text("#spoken");
  seen.tip = !document.getElementById("tip").hidden;
  press("Enter");
  seen.entered = span() < whole / 10;
  press("0"); press("+");
  seen.halved = span() / whole;
  press("Escape");
  seen.left = document.getElementById("tip").hidden;
  document.querySelector('[data-view="all"]').click();
  svg.dispatchEvent(new WheelEvent("wheel", { deltaY: -100, clientX: 600, cancelable: true }));
  seen.wheeled = span() / whole;
  const begin = view.begin;
  press("ArrowRight"); draw();
  seen.panned = view.begin > begin;
  const heads = [...document.querySelectorAll("#heads button")];
  const lines = () => [...document.querySelectorAll("#rows tr")];
  const column = (number) => lines().map((row) => row.children[number].textContent);
  heads[0].click();
  seen.names = column(0);
  heads[7].click();
  seen.sort = document.querySelectorAll("#heads th")[7].getAttribute("aria-sort");
  document.getElementById("filter").value = "backward";
  document.getElementById("filter").dispatchEvent(new Event("input"));
  seen.filtered = column(1);
  seen.count = text("#count");
  document.getElementById("which").value = "1";
  document.getElementById("which").dispatchEvent(new Event("change"));
  document.querySelector("#rows tr").click();
  seen.shown = !document.getElementById("tip").hidden;
  seen.title = text("#tip b");
  seen.errors = document.documentElement.dataset.errors || "";
  document.documentElement.dataset.result = JSON.stringify(seen);
});
"""


@needs_browser
def test_a_browser_zooms_sorts_filters_and_tells_by_wheel_and_keys(tmp_path):
    text = page_of([training_step(rank, 2, 4) for rank in range(2)], 2)
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{DRIVE}</script></body>"))
    found = result_of(dom_of(path, tmp_path / "p"))
    assert found["errors"] == ""
    assert found["tip"] and found["entered"] and found["left"] and found["panned"]
    assert re.match(
        r"(exposed: waits for all_reduce|compute gemm); rank 0; time \d", found["spoken"]
    )
    assert found["halved"] == pytest.approx(0.5)
    assert 0.5 < found["wheeled"] < 0.8
    assert found["names"] == sorted(found["names"], key=str.lower)
    assert found["sort"] == "descending"
    assert found["filtered"] == ["backward"] * 4 and found["count"] == "4 of 8 rows"
    assert found["shown"] and "mlp.backward" in found["title"]


@needs_browser
def test_a_browser_shows_what_there_is_when_ranks_are_missing(tmp_path):
    path = tmp_path / "page.html"
    text = page_of([recording([], rank=1, world_size=3, error=UNFRIENDLY)], 3)
    path.write_text(
        text.replace(
            "</body>",
            "<script>document.documentElement.dataset.result = JSON.stringify({"
            "errors: document.documentElement.dataset.errors || '',"
            "cards: document.querySelectorAll('.card').length,"
            "warnings: document.getElementById('warnings').textContent});</script></body>",
        )
    )
    found = result_of(dom_of(path, tmp_path / "p"))
    assert found["errors"] == "" and found["cards"] == 3
    assert UNFRIENDLY in found["warnings"] and "Rank 2: nothing is known" in found["warnings"]


def test_the_page_loads_nothing_and_no_name_ends_its_data():
    text = page_of([training_step(0, 1, 3)], 1)
    assert not re.search(r"""(src|href)\s*=|url\((?!#)|@import|fetch\(|XMLHttpRequest""", text)
    assert text.count("</script>") == 2 and UNFRIENDLY not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    layers = {each.get("layer") for each in json.loads(data[1])["details"]}
    assert UNFRIENDLY in layers


def test_a_wheel_has_what_the_page_is_made_of():
    """`package-data` of pyproject.toml covers every file here that is no module."""
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["tpkernels"]
    others = [path for path in PACKAGE.rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert len(others) >= 9
    for path in others:
        assert any(path.relative_to(PACKAGE.parent).match(each) for each in patterns), path


def test_the_files_are_side_by_side(tmp_path):
    for given in ("step", "step.html"):
        outputs = Outputs(tmp_path / given)
        names = [path.name for path in outputs.paths]
        assert names == ["step.html", "step.perfetto.json", "step.summary.json"]
        assert outputs.of_rank(3).name == "step.rank3.json"
    write_all([training_step(0, 1, 2)], 1, outputs)
    assert all(path.stat().st_size for path in outputs.paths)
    assert Outputs("v1.2").page.name == "v1.2.html"


def test_perfetto_has_all_ranks_on_one_clock(tmp_path):
    """Rank 1's clock is 5 s behind: its interval at 200 ns there is 1 us after rank 0 began."""
    zero = 5 * 10**9
    ranks = [
        recording(
            [operation("mlp", zero, zero + 900, layer="a"), compute(zero, zero + 500, 0)],
            0,
            2,
            begun=zero,
        ),
        recording(
            [operation("mlp", 200, 700, layer="a"), sent(300, 600, 0), sent(400, 700, 0)],
            1,
            2,
            begun=100,
            clock=[SyncPoint(100, 5_000_000_800, 5), SyncPoint(1100, 5_000_000_800, 5)],
        ),
    ]
    trace = json.loads(json.dumps(chrome_trace(aligned(ranks))))
    events = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events] == [
        (0, "mlp", 0.0, 0.9),
        (0, "gemm", 0.0, 0.5),
        (1, "mlp", 1.0, 0.5),
        (1, "all_reduce", 1.1, 0.3),
        (1, "all_reduce", 1.2, 0.3),
    ]
    assert events[3]["tid"] != events[4]["tid"]  # they overlap, and events of a thread must nest
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"rank 0 on host", "rank 1 on host", "communication 1"} <= names


def test_perfetto_events_of_a_thread_nest():
    for rank in range(2):
        by_thread: dict[int, list[tuple[float, float]]] = {}
        for event in chrome_trace(aligned([training_step(rank, 2, 20)]))["traceEvents"]:
            if event["ph"] == "X":
                spans = by_thread.setdefault(event["tid"], [])
                spans.append((round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)))
        for spans in by_thread.values():
            stack: list[tuple[float, float]] = []
            for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
                while stack and stack[-1][1] <= begin:
                    stack.pop()
                assert not stack or end <= stack[-1][1]
                stack.append((begin, end))
