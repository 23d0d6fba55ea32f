"""The tests marked ``gpu``, in a few processes at once; what one process loses, the next goes on.

A kernel that fails can take the CUDA context of its process with it, hang it or crash it. So every
test is written down as it starts and as it ends (``recording.py``), and a process that ended early
is started again for the tests that were not reached.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from lifeline import tied_to_us

WRITE_EVERY = 3.0  # seconds
STUCK = 100.0  # seconds without a sign of life before a process is killed
_MARKED = re.compile(r"\bmark\.gpu\b")
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd]")


@dataclass
class Worker:
    """One process, its part of the tests, and the file in which it notes what happened."""

    number: int
    count: int
    marks: str
    notes: Path
    output: Path
    process: subprocess.Popen[bytes] | None = None
    reached: int = -1  # tests that had started when the process was started
    ends: list[str] = field(default_factory=list)  # how it ended early

    def start(self, files: list[str]) -> None:
        self.reached = len(self.started())
        plugins = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, plugins)),
            "GPU_TESTS_NOTES": str(self.notes),
            "GPU_TESTS_SHARE": f"{self.number}/{self.count}",
        }
        command = [sys.executable, "-m", "pytest", "-p", "recording", "-m", self.marks, "-vv"]
        command += ["--tb=short", "--continue-on-collection-errors", "-o", "timeout=60", *files]
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(
                command, env=env, stdout=file, stderr=file, preexec_fn=tied_to_us()
            )

    def all_notes(self) -> list[dict]:
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def started(self) -> list[str]:
        return [note["start"] for note in self.all_notes() if "start" in note]

    def silent(self) -> float:
        latest = max(p.stat().st_mtime for p in (self.notes, self.output) if p.exists())
        return time.time() - latest

    def collected(self) -> list[str]:
        return next((n["collected"] for n in self.all_notes() if "collected" in n), [])

    def missing(self) -> list[str]:
        started = set(self.started())
        return [name for name in self.collected() if name not in started]


def main() -> int:
    """0 if every test passed or was skipped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    parser.add_argument("--quick", action="store_true", help="without those marked slow")
    options = parser.parse_args()
    files = sorted(
        str(p) for p in Path("tests").rglob("test_*.py") if _MARKED.search(p.read_text())
    )
    if not files:
        print("no test is marked gpu")
        return 0
    stopping: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: stopping.append(number))
    workers = [
        Worker(
            number,
            options.workers,
            "gpu and not slow" if options.quick else "gpu",
            options.scratch / f"notes-{number}",
            options.scratch / f"tests-{number}",
        )
        for number in range(options.workers)
    ]
    for worker in workers:
        worker.start(files)
    written = time.monotonic()
    while any(worker.process for worker in workers) and not stopping:
        time.sleep(0.1)
        for worker in workers:
            _look_after(worker, files)
        if time.monotonic() - written > WRITE_EVERY:  # whatever ends this process finds results
            _write(_all_cases(workers, running=True), options.results)
            written = time.monotonic()
    for worker in workers:
        if worker.process is not None:
            worker.process.kill()
            worker.process.wait()
            worker.ends.append("the time limit came")
    for worker in workers:
        print(f"=== process {worker.number + 1} of {worker.count}")
        print(worker.output.read_text(errors="replace") if worker.output.exists() else "")
    cases = _all_cases(workers)
    _write(cases, options.results)
    counts = {kind: sum(c["outcome"] == kind for c in cases) for kind in _KINDS}
    print("tests: " + ", ".join(f"{count} {kind}" for kind, count in counts.items() if count))
    ended = [end for worker in workers for end in worker.ends]
    for end in ended:
        print(f"a test process ended early: {end}")
    return int(bool(counts["failed"] or ended))


_KINDS = ("passed", "failed", "skipped", "not reached")


def _look_after(worker: Worker, files: list[str]) -> None:
    process = worker.process
    if process is None:
        return
    if process.poll() is None:
        if worker.silent() > STUCK:
            process.kill()
            process.wait()
        else:
            return
    worker.process = None
    missing, reached = worker.missing(), len(worker.started())
    if process.returncode in (0, 1, 5) and not missing:
        return
    doing = f"in {worker.started()[-1]}" if reached else "before the first test"
    how = f"exit status {process.returncode}"
    worker.ends.append(f"{how}, {doing}" + (f", {len(missing)} tests to go" if missing else ""))
    if missing and reached > worker.reached:
        worker.start(files)


def _all_cases(workers: list[Worker], *, running: bool = False) -> list[dict]:
    """By name: every process tells of a file that cannot be imported."""
    cases = {case["name"]: case for worker in workers for case in _cases(worker)}
    for case in cases.values():
        if running and case.get("running"):  # not yet a failure
            case.update(outcome="not reached", text="was running when this was written")
    return list(cases.values())


def _cases(worker: Worker) -> list[dict]:
    """One a test: name, outcome, seconds, text; and one for tests that could not be collected."""
    cases: dict[str, dict] = {}
    for name in worker.collected():
        cases[name] = {"name": name, "outcome": "not reached", "seconds": 0.0, "text": ""}
    for note in worker.all_notes():
        if "start" in note:
            text = "the process ended before the test did"
            case = {"name": note["start"], "outcome": "failed", "seconds": 0.0, "text": text}
            cases[note["start"]] = {**case, "running": True}
        elif "name" in note:
            case = cases.setdefault(note["name"], {"seconds": 0.0, "running": True, **note})
            if case.pop("running", False) or note["outcome"] == "failed":
                case.update(outcome=note["outcome"], text=note["text"])
            case["seconds"] += note["seconds"]
    if not cases and worker.ends:
        text = worker.ends[0]
        cases["collection"] = {
            "name": "collection",
            "outcome": "failed",
            "seconds": 0,
            "text": text,
        }
    return list(cases.values())


def _write(cases: list[dict], path: Path) -> None:
    """JUnit XML, of what was noted."""
    suite = ElementTree.Element(
        "testsuite",
        name="gpu",
        tests=str(len(cases)),
        failures=str(sum(case["outcome"] == "failed" for case in cases)),
        skipped=str(sum(case["outcome"] in ("skipped", "not reached") for case in cases)),
        time=f"{sum(case['seconds'] for case in cases):.3f}",
    )
    for case in cases:
        file, _, name = case["name"].partition("::")
        seconds = f"{case['seconds']:.3f}"
        element = ElementTree.SubElement(
            suite,
            "testcase",
            classname=file.removesuffix(".py").replace("/", "."),
            name=_NOT_XML.sub("?", name or file),
            time=seconds,
        )
        if case["outcome"] != "passed":
            kind = "failure" if case["outcome"] == "failed" else "skipped"
            text = _NOT_XML.sub("?", case["text"] or case["outcome"])
            last = next((li for li in reversed(text.splitlines()) if li.strip()), "")
            told = next((li[1:].strip() for li in text.splitlines() if li.startswith("E ")), last)
            ElementTree.SubElement(element, kind, message=told[:300]).text = text
    root = ElementTree.Element("testsuites")
    root.append(suite)
    part = path.with_name(f"{path.name}.part")
    ElementTree.ElementTree(root).write(part, encoding="utf-8", xml_declaration=True)
    part.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
