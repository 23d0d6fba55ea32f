"""``bench/gpu_check.sh``: usage, a dry run, an interrupt; and its parts with planted failures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu_check.sh"


@pytest.fixture
def parts(monkeypatch):
    """`parts(name)`: a module of bench/gpu_check, as its own program imports it."""
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "gpu_check"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "bench") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def environment(tmp_path):
    """No GPU, and temporary files where they can be looked at."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path / "tmp")}
    return {**os.environ, **own}


def check(tmp_path, *arguments, **extra):
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), **extra},
        cwd=tmp_path,
        timeout=170,
    )


# --- usage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: OUT_DIR"),
        (("out", "--fast"), "unrecognized arguments: --fast"),
        (("file", "--dry-run"), "OUT_DIR file is a file. Fix: name a directory"),
        (("file/out", "--dry-run"), "OUT_DIR file/out cannot be written: Not a directory. Fix:"),
    ],
)
def test_bad_usage_is_one_error(tmp_path, arguments, message):
    (tmp_path / "file").touch()
    done = check(tmp_path, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1


def test_without_a_gpu_the_error_names_the_dry_run(tmp_path):
    done = check(tmp_path, "out")
    assert done.returncode == 2
    assert "sees no CUDA device. Fix: " in done.stderr and "--dry-run" in done.stderr


def test_a_python_that_is_not_there(tmp_path):
    done = check(tmp_path, "out", "--dry-run", PYTHON="python-of-no-machine")
    assert done.returncode == 2 and "python-of-no-machine not found. Fix: " in done.stderr


def test_a_python_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    done = check(tmp_path, "out", "--dry-run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "cannot import torch (ImportError: no torch here). Fix: PYTHON=" in done.stderr


@pytest.mark.skipif(not (ROOT / ".venv" / "bin" / "python").exists(), reason="no .venv here")
def test_the_checkout_s_own_python_serves_where_python3_has_no_torch(tmp_path):
    stub = tmp_path / "bin" / "python3"
    stub.parent.mkdir()
    stub.write_text("#!/bin/sh\nexit 1\n")
    stub.chmod(0o755)
    path = f"{stub.parent}{os.pathsep}{os.environ['PATH']}"
    assert check(tmp_path, "--help", PYTHON="", PATH=path).returncode == 0
    assert check(tmp_path, "--help", PYTHON="python3", PATH=path).returncode == 2


def test_help_names_every_option(tmp_path):
    done = check(tmp_path, "--help")
    assert done.returncode == 0
    for word in ("OUT_DIR", "--quick", "--dry-run", "--commit", "summary.md", "PYTHON"):
        assert word in done.stdout


def test_a_user_s_own_files_are_refused_and_an_earlier_run_s_replaced(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.md").write_text("my own\n")
    (out / "summary.md").write_text("# Of something else\n")
    done = check(tmp_path, out, "--dry-run")
    assert done.returncode == 2 and done.stderr.count("error:") == 1
    assert "holds summary.md, report.md, of no earlier run" in done.stderr
    assert (out / "report.md").read_text() == "my own\n"
    (out / "summary.md").write_text("# GPU check of abc, 2026-01-01\n")
    (out / "mine.md").touch()
    if torch.cuda.is_available():
        return
    assert "sees no CUDA device" in check(tmp_path, out).stderr
    assert {path.name for path in out.iterdir()} == {"log.txt", "summary.md", "mine.md"}
    assert "| machine | passed |" in (out / "summary.md").read_text()


# --- whole runs ---------------------------------------------------------------------------------


def tree():
    """The names in the checkout, and the times of what a build in it would replace."""
    own = {".git", ".venv", "__pycache__", ".hypothesis", ".mypy_cache", ".ruff_cache"}
    found = {}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in own]
        for name in names:
            path = Path(folder, name)
            built = name.startswith(("_C.", "_build_info"))
            found[path] = path.stat().st_mtime_ns if built else None
    return found


def test_a_dry_run_passes_and_leaves_only_its_results(tmp_path):
    before, out = tree(), tmp_path / "out"
    out.mkdir()
    (out / "summary.md").write_text("# GPU check of an older run\n")
    (out / "results.jsonl").write_text("of an older run\n")
    done = check(tmp_path, out, "--dry-run", TPKERNELS_GEMM="no such implementation")
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree() == before
    assert list((tmp_path / "tmp").iterdir()) == []
    names = {path.name for path in out.rglob("*")}
    assert names <= {
        *("summary.md", "log.txt", "junit.xml", "results.jsonl", "report.md", "chart.svg")
    }
    summary = (out / "summary.md").read_text()
    for step in ("machine", "build", "doctor", "tests", "bench gemm_gelu", "bench mlp", "report"):
        assert f"| {step} | passed |" in summary, summary
    for step in ("tune gemm_gelu", "tune mlp", "memcheck", "racecheck"):
        assert f"| {step} | skipped | 0.0 | needs CUDA |" in summary
    assert "NOT AT ITS END" not in summary
    assert len(done.stdout.rstrip().splitlines()) - done.stdout.count("gpu_check: ") < 60
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["op"].split("_")[0] for row in rows} == {"gemm", "mlp"}
    assert "## Benchmarks" in summary and "gemm_gelu float32 ours" in summary
    cases = ElementTree.parse(out / "junit.xml").getroot().iter("testcase")
    outcomes = [[child.tag for child in case] for case in cases]
    assert outcomes and all(tags == ["skipped"] for tags in outcomes)


def running_tests(tmp_path):
    """A dry run that is in its tests."""
    process = subprocess.Popen(
        ["bash", str(SCRIPT), "out", "--dry-run"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    for line in process.stdout:
        if "tests (at most" in line:
            break
    time.sleep(1.0)
    return process


def test_a_hard_kill_loses_no_step_and_leaves_no_process(tmp_path):
    process = running_tests(tmp_path)
    children = descendants(process.pid)
    assert len(children) >= 2  # gpu_tests.py and pytest
    process.kill()
    process.communicate(timeout=60)
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "NOT AT ITS END" in summary and "| doctor | passed |" in summary
    for _ in range(100):
        if not any(map(alive, children)):
            return
        time.sleep(0.1)
    raise AssertionError("still running")


def descendants(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM])  # SIGINT and SIGHUP: the same handler
def test_a_signal_ends_the_step_and_writes_the_summary(tmp_path, number):
    process = running_tests(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "| tests | interrupted |" in summary and "| doctor | passed |" in summary
    assert f"interrupted by {number.name}" in output
    assert list((tmp_path / "tmp").iterdir()) == []


# --- steps ------------------------------------------------------------------------------------


@pytest.fixture
def run(parts, tmp_path, monkeypatch):
    """`run(step, left=60)`: the result of a step with so many seconds to the deadline."""
    runner = parts("runner")
    monkeypatch.setattr(runner, "GRACE", 0.3)
    monkeypatch.setattr(runner, "RESERVE", 2.0)

    def run_step(step, left=60.0):
        with runner.Log(tmp_path / "log.txt") as log:
            env = dict(os.environ)
            return runner.Runner(log, tmp_path, env, time.monotonic() + left).run(step)

    return run_step


def python(code):
    return (sys.executable, "-S", "-c", code)


def test_a_step_passes_or_fails_by_its_exit_status(parts, run):
    step = parts("runner").Step
    done = run(step("one", python("print('fine')")))
    assert (done.state, done.output, done.fine) == ("passed", "fine\n", True)
    failed = run(step("two", python("print('before'); raise ValueError('of no use')")))
    assert (failed.state, failed.fine) == ("failed", False)
    assert failed.detail == "ValueError: of no use"
    killed = run(step("three", python("import os; os.kill(os.getpid(), 11)")))
    assert killed.state == "failed" and killed.detail.startswith("killed by signal 11")
    assert run(step("four", ("no-such-program",))).detail.startswith("no-such-program: No such")


def test_a_step_over_its_limit_is_asked_to_end_and_then_killed(parts, run, tmp_path):
    step = parts("runner").Step
    polite = "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: print('kept')"
    done = run(step("polite", python(polite), limit=0.5))
    assert (done.state, done.output, done.fine) == ("timed out", "kept\n", False)
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    began = time.monotonic()
    assert run(step("deaf", python(deaf), limit=0.5)).state == "timed out"
    assert time.monotonic() - began < 10


def test_what_a_step_leaves_running_is_killed(parts, run, tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid)"
    done = run(parts("runner").Step("parent", python(code)))
    for _ in range(50):
        if not alive(int(done.output)):
            return
        time.sleep(0.1)
    raise AssertionError("still running")


def test_a_step_gets_what_is_left_or_is_not_run(parts, run):
    step = parts("runner").Step
    told = ("echo", "{seconds}")
    assert run(step("all", told, limit=40)).output == "30\n"
    assert run(step("less", told, limit=40), left=22.0).output == "15\n"
    late = run(step("late", told, least=5), left=6.0)
    assert (late.state, late.detail, late.fine) == ("not run", "no time left", True)
    assert run(step("last", told, least=5, last=True), left=6.0).state == "passed"


def test_an_informative_step_does_not_fail_the_run(parts, run):
    step = parts("runner").Step
    found = run(step("race", python("print('1 error'); exit(9)"), informative=True))
    assert (found.state, found.detail, found.fine) == ("informative", "failed: 1 error", True)
    slow = run(step("slow", ("sleep", "60"), limit=0.2, informative=True))
    assert slow.state == "informative" and slow.detail.startswith("timed out")
    assert run(step("fine", ("true",), informative=True)).state == "passed"
    absent = run(step("tests", failed="pytest is not installed"))
    assert (absent.state, absent.detail, absent.fine) == (
        "failed",
        "pytest is not installed",
        False,
    )


def test_something_is_done_while_a_step_runs(parts, tmp_path, monkeypatch):
    runner = parts("runner")
    monkeypatch.setattr(runner, "TICK", 0.1)
    calls = []
    with runner.Log(tmp_path / "log.txt") as log:
        deadline = time.monotonic() + 60
        steps = runner.Runner(log, tmp_path, dict(os.environ), deadline, lambda: calls.append(1))
        assert steps.run(runner.Step("slow", ("sleep", "0.6"))).state == "passed"
        assert len(calls) >= 3
        assert steps.run(runner.Step("limit", ("sleep", "60"), limit=0.3)).state == "timed out"


def test_a_log_that_is_too_long_loses_its_middle_and_says_so(parts, tmp_path, monkeypatch):
    runner = parts("runner")
    monkeypatch.setattr(runner, "LOG_BYTES", 2000)
    with runner.Log(tmp_path / "log.txt") as log:
        log.write("first\n" + "x" * 5000 + "\nlast\n")
        assert len(log.since(0)) < 2000 and log.since(5000).endswith("x\nlast\n")
    text = (tmp_path / "log.txt").read_text()
    assert text.startswith("first\nx") and text.endswith("x\nlast\n") and 1800 < len(text) < 2000
    left_out = int(text.split("##### ")[1].split(" bytes are left out")[0])
    assert text.count("x") + left_out == 5000
    with runner.Log(tmp_path / "short.txt") as log:
        log.write("all of it")
    assert (tmp_path / "short.txt").read_text() == "all of it"


@pytest.mark.parametrize("absent", ["pytest", "hypothesis"])
def test_what_the_tests_need_is_a_failure_of_a_real_run(parts, tmp_path, absent):
    plan, workspace = parts("plan"), parts("workspace")
    space = workspace.Workspace(ROOT, tmp_path, tmp_path)
    facts = {"torch": "2.11.0", "pytest": "9", "hypothesis": "6", absent: "none"}
    for dry_run in (False, True):
        listed = plan.steps(plan.Settings(tmp_path, dry_run, dry_run, "abc"), space, facts)
        tests = next(step for step in listed if step.name == "tests")
        assert f"{absent} is not installed" in (tests.failed or "")
        assert (tests.skipped is not None) == dry_run


# --- the machine ------------------------------------------------------------------------------


def test_a_machine_step_that_timed_out_says_so_and_the_run_goes_on(parts, tmp_path, monkeypatch):
    runner = parts("runner")
    path = ROOT / "bench" / "gpu_check" / "__main__.py"
    spec = importlib.util.spec_from_file_location("gpu_check_main", path)
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    settings = parts("plan").Settings(tmp_path, False, False, "abc")

    class Timed:
        def run(self, step):
            assert step.limit >= 150
            return runner.Result("machine", "timed out", 150.0, "pytest: 9", "pytest: 9\n")

        def say(self, text):
            assert "going on" in text

    results = []
    assert main._look(Timed(), settings, results) == {"pytest": "9"}
    assert [each.fine for each in results] == [False]
    monkeypatch.setattr(main.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(main.Refused, match="torch is not there"):
        main._look(Timed(), settings, [])


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", "{}, of unknown version"),
        ("one line", "one line"),
        ("nvcc: NVIDIA\nCuda compilation tools, release 13.0, V13.0.88\nBuild x", "Cuda compilat"),
    ],
)
def test_nvcc_of_any_number_of_lines(parts, tmp_path, printed, expected):
    program = tmp_path / "nvcc"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{printed}\nE\n" if printed else "#!/bin/sh\n")
    program.chmod(0o755)
    assert parts("machine")._release(str(program)).startswith(expected.format(program))


def test_a_dry_run_s_extension_is_there_only_where_it_loads(parts, monkeypatch, capsys):
    present = parts("present")
    executed = []
    monkeypatch.setattr(present.os, "execv", lambda program, words: executed.append(words))
    monkeypatch.setattr(present.native, "load", lambda: None)
    present.main()
    assert "does not serve" in capsys.readouterr().out
    assert executed == [[sys.executable, "-m", "tpkernels.build", "--optional"]]
    monkeypatch.setattr(present, "sources_hash", lambda root: "other")
    monkeypatch.setattr(present.native, "load", lambda: present)
    present.main()
    assert len(executed) == 2 and "is there already" not in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: they would run")
@pytest.mark.parametrize("quick", [False, True])
def test_the_commands_of_a_real_run_are_taken_by_their_programs(parts, tmp_path, capsys, quick):
    """Every `tpkernels bench` call gets as far as asking for the GPU."""
    from tpkernels.benchmarks import command

    plan, workspace = parts("plan"), parts("workspace")
    settings = plan.Settings(tmp_path, False, quick, "abc")
    space = workspace.Workspace(ROOT, tmp_path, tmp_path)
    facts = {"torch": "2.11.0", "pytest": "9", "matplotlib": "3"}
    listed = plan.steps(settings, space, facts)
    assert [step.name for step in listed if step.name.startswith(("tune", "bench"))] == [
        *("tune gemm_gelu", "bench gemm_gelu", "tune mlp", "bench mlp")
    ]
    for step in listed:
        if "bench" in step.command and "report" not in step.command:
            arguments = step.command[step.command.index("bench") + 1 :]
            code = command.main([word.replace("{seconds}", "30") for word in arguments])
            said = capsys.readouterr().err
            assert code == 2 and "GPU" in said and "usage" not in said, said


@pytest.mark.parametrize(("quick", "seconds"), [(False, 470), (True, 170)])
def test_what_tells_most_fits_in_the_time_even_at_its_limits(parts, tmp_path, quick, seconds):
    plan, workspace = parts("plan"), parts("workspace")
    space = workspace.Workspace(ROOT, tmp_path, tmp_path)
    facts = {"torch": "2.11.0", "pytest": "9", "hypothesis": "6"}
    listed = plan.steps(plan.Settings(tmp_path, False, quick, "abc"), space, facts)
    names = [step.name for step in listed]
    assert names.index("tests") < names.index("tune gemm_gelu") < names.index("memcheck")
    assert names[-1] == "report"
    forward = next(step for step in listed if step.name == "bench gemm_gelu").command
    words = " ".join(forward)
    assert "--models gpt2-xl gpt3-13b --m 8192" + " 2048" * (not quick) + " --tp 1 8" in words
    assert " --m 8192 --tp " in " ".join(next(s for s in listed if s.name == "bench mlp").command)
    sanitizers = {step.name: step for step in listed if step.name.endswith("check")}
    assert "--report-api-errors no" in " ".join(sanitizers["memcheck"].command)
    assert not sanitizers["memcheck"].informative and sanitizers["racecheck"].informative
    through_tests = sum(step.limit for step in listed[: names.index("tests") + 1])
    assert through_tests < seconds * 0.99 - 12
    assert sum(s.limit for s in listed if s.name.startswith(("tune gemm", "bench gemm"))) < 165


# --- the summary ------------------------------------------------------------------------------


def row(implementation, m, ratio, **more):
    values = {"op": "gemm_gelu", "dtype": "bfloat16", "implementation": implementation}
    return {**values, "shape": {"m": m, "n": 4, "k": 8}, "ratio_to_eager": ratio, **more}


def test_the_summary_is_short_and_names_what_failed(parts, tmp_path):
    runner, plan, summary = parts("runner"), parts("plan"), parts("summary")
    suite = ElementTree.Element("testsuite")
    for number in range(80):
        case = ElementTree.SubElement(suite, "testcase", classname="tests.gpu", name=f"t{number}")
        ElementTree.SubElement(case, "failure", message="wrong | by far")
    ElementTree.ElementTree(suite).write(tmp_path / "junit.xml")
    rows = [row("ours", 2048, 1.2), row("ours", 8192, 1.1), row("ours", 16, 0.5)]
    rows += [row("eager", m, 1.0) for m in (2048, 8192, 16)] + [row("compile", 16, None)]
    rows += [row(f"ours:{n}", 16, 1.0) for n in range(30)]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    (tmp_path / "results.jsonl").write_text(text + '{"op": "cut sh')
    results = [
        runner.Result("tests", "failed", 12.0, "FAILED t0", "tests: 80 failed"),
        runner.Result("tune", "not run", detail="no time left"),
    ]
    settings = plan.Settings(tmp_path, False, False, "abc")
    shown = summary.write(tmp_path, results, settings, 400.0)
    assert len(shown.splitlines()) < 60
    assert "gpu::t0: wrong | by far" in shown and "and 68 more: see summary.md" in shown
    assert "NOT all passed" in shown
    medians = {m["implementation"]: m for m in summary.bench_medians(tmp_path / "results.jsonl")}
    assert medians["ours"]["median"] == 1.1
    assert medians["ours"]["wide_median"] == pytest.approx(1.15)
    assert medians["ours"]["wide_lowest"] == 1.1
    assert medians["compile"]["median"] is None and medians["compile"]["unmeasured"] == 1
    written = (tmp_path / "summary.md").read_text()
    assert written.count("wrong | by far") == 80
    assert "| tests | failed | 12.0 | tests: 80 failed |" in written
    assert "| tune | not run | 0.0 | no time left |" in written


def test_without_rows_the_summary_says_not_measured(parts, tmp_path):
    summary, settings = parts("summary"), parts("plan").Settings(tmp_path, True, True, "abc")
    summary.write(tmp_path, [], settings, 1.0)
    assert "## Benchmarks\n\nnot measured\n" in (tmp_path / "summary.md").read_text()
