"""`bench zero3`'s options name themselves where they are refused."""

from __future__ import annotations

import pytest

from tpkernels.benchmarks.command import main


@pytest.mark.parametrize("text", ["-1", "0", "nan", "soon"])
def test_a_time_that_is_none_names_its_own_option(text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["zero3", "--seconds", text])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert f"'{text}' is not a time" in error and "Fix: --seconds 220" in error
    assert "--budget" not in error
