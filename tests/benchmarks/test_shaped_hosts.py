"""Shaped hosts: what ranks are told, the rate, failures and limits, and that nothing stays."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpkernels.benchmarks import shaped_hosts
from tpkernels.benchmarks.shaped_hosts import (
    CannotShape,
    Host,
    ShapedNetwork,
    cannot_shape,
    module_path,
    run_ranks,
)
from tpkernels.testing.rank_errors import RankError, RankTimeoutError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")

RATE_BITS = 100e6
PAYLOAD = 4 << 20
# Rank 1 connects to rank 0 and sends; rank 0 prints the seconds until the last byte is there.
TRANSFER = f"""
import os, socket, time
size, rank = {PAYLOAD}, int(os.environ["RANK"])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(address)
    peer, _ = server.accept()
    start, left = time.perf_counter(), size
    while left:
        left -= len(peer.recv(1 << 16))
    print(time.perf_counter() - start)
else:
    while True:
        try:
            peer = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.01)
    peer.sendall(bytes(size))
"""
TELL = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
         "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "EXTRA")
told = {name: os.environ.get(name) for name in names}
told["cores"] = sorted(os.sched_getaffinity(0))
print(json.dumps(told))
"""


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.fixture(scope="module")
def network():
    with shaped(2, "100mbit") as made:
        yield made


def shaped(hosts: int, rate: str) -> ShapedNetwork:
    """One, or a skip that says why there is none."""
    try:
        with ShapedNetwork(1, rate):
            pass
    except CannotShape as reason:
        pytest.skip(f"links cannot be shaped here: {reason}")
    return ShapedNetwork(hosts, rate)


def told(hosts, **options) -> list[dict[str, object]]:
    """What each rank was told: rank 0's output, and the others' by turning them into rank 0."""
    found = []
    for first in range(len(hosts)):
        shown = io.StringIO()
        turned = [*hosts[first:], *hosts[:first]]
        run_ranks(python(TELL), turned, seconds=30, show=shown, **options)
        found.append(json.loads(shown.getvalue()))
    return found


def test_each_shaped_rank_has_a_host_a_core_and_a_thread(network):
    first, second = told(network.hosts, environment={"EXTRA": "yes"})
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "10.77.0.1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
        "EXTRA": "yes",
        "cores": [min(os.sched_getaffinity(0))],
    }
    assert second["MASTER_ADDR"] == "10.77.0.2"


def test_ranks_over_loopback_are_of_one_host():
    (first, _) = told([Host(), Host()])
    assert (first["LOCAL_WORLD_SIZE"], first["GROUP_RANK"]) == ("2", "0")
    assert (first["MASTER_ADDR"], first["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_a_link_is_no_faster_than_its_rate(network):
    """Also that it is much slower than loopback, which is what shaping is for."""
    seconds = {}
    for name, hosts in (("shaped", network.hosts), ("loopback", [Host(), Host()])):
        shown = io.StringIO()
        run_ranks(python(TRANSFER), hosts, seconds=30, show=shown)
        seconds[name] = float(shown.getvalue())
    least = PAYLOAD * 8 / RATE_BITS
    assert seconds["shaped"] > 0.85 * least  # the queue's burst may pass at once
    assert seconds["loopback"] < 0.5 * least


def test_a_rank_changes_the_rate_of_its_own_host(network):
    change = """
import subprocess
from tpkernels.benchmarks.shaped_hosts import shape_link
shape_link("123456kbit")
print(subprocess.check_output(["tc", "qdisc", "show", "dev", "eth0"], text=True))
shape_link("100mbit")
"""
    shown = io.StringIO()
    run_ranks(python(change), network.hosts[:1], seconds=60, show=shown, environment=module_path())
    assert "rate 123456Kbit" in shown.getvalue()


def test_only_a_shaped_link_can_change_its_rate(network):
    """Never that of the machine itself, which has none."""
    with pytest.raises(CannotShape, match="`tc qdisc change dev eth0 root tbf"):
        shaped_hosts.shape_link("1gbit")


def test_a_rank_that_fails_ends_the_run_and_is_named():
    text = "import os, time\nif os.environ['RANK'] == '1': raise ValueError('no luck')\n"
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 raised ValueError: no luck") as raised:
        run_ranks(python(text + "time.sleep(60)"), [Host()] * 3, seconds=50, show=io.StringIO())
    assert time.monotonic() - start < 30
    assert [failure.rank for failure in raised.value.failures] == [1]
    assert "Traceback" in raised.value.remote_traceback


def test_a_rank_that_dies_without_a_word_is_named():
    text = "import os, signal, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)\n"
    with pytest.raises(RankError, match="rank 0 died: it was killed by SIGKILL"):
        run_ranks(python(text + "time.sleep(60)"), [Host()] * 2, seconds=50, show=io.StringIO())


def test_a_time_limit_names_who_is_late_and_shows_what_it_wrote():
    text = "import os, time\nif os.environ['RANK'] == '1': print('busy', flush=True)\n"
    text += "if os.environ['RANK'] == '1': time.sleep(60)\n"
    with pytest.raises(RankTimeoutError, match="rank 1 did not end within 3 s") as raised:
        run_ranks(python(text), [Host()] * 2, seconds=3, show=io.StringIO())
    assert [failure.rank for failure in raised.value.failures] == [1]
    assert "busy" in raised.value.remote_traceback


def holders(network: ShapedNetwork) -> list[int]:
    return [int(host.prefix[host.prefix.index("--target") + 1]) for host in network.hosts]


def exists(pid: int) -> bool:
    """Not one that has ended and only waits to be noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_closing_ends_what_holds_the_namespaces():
    with shaped(3, "1gbit") as made:
        pids = holders(made)
        assert len(set(pids)) == 3 and all(exists(pid) for pid in pids)
    assert made.hosts == [] and not any(exists(pid) for pid in pids)


PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from tpkernels.benchmarks.command import interruptible
from tpkernels.benchmarks.shaped_hosts import ShapedNetwork, run_ranks
rank = "import os, sys, time; open(sys.argv[1] + os.environ['RANK'], 'w').write(str(os.getpid())); "
try:
    with interruptible(), ShapedNetwork(2, "1gbit") as network:
        pids = [h.prefix[h.prefix.index("--target") + 1] for h in network.hosts]
        open(sys.argv[1] + "holders", "w").write(" ".join(pids))
        run_ranks([sys.executable, "-c", rank + "time.sleep(60)", sys.argv[1]], network.hosts,
                  seconds=50)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_nothing_stays_however_the_run_ends(number, tmp_path, network):
    folder = f"{tmp_path}/"
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, folder], env={**os.environ, **module_path()}
    )
    names = ["holders", "0", "1"]
    try:
        pids = wait_for_pids([tmp_path / name for name in names], process)
        assert len(pids) == 4 and all(exists(pid) for pid in pids)
        process.send_signal(number)
        assert process.wait(timeout=20) == (-9 if number == signal.SIGKILL else 130)
        deadline = time.monotonic() + 10
        while any(exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [pid for pid in pids if exists(pid)] == []
    finally:
        process.kill()
        process.wait()


def wait_for_pids(files: list[Path], process: subprocess.Popen[bytes]) -> list[int]:
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return [int(pid) for file in files for pid in file.read_text().split()]


@pytest.mark.parametrize(
    ("target", "value", "message"),
    [
        ("sys.platform", "darwin", "network namespaces need Linux, and this is darwin"),
        ("os.geteuid", lambda: 1000, "network namespaces need root, and this is user 1000"),
        ("shutil.which", lambda tool: tool if tool != "tc" else None, "'tc' is not in PATH"),
    ],
    ids=["platform", "user", "tool"],
)
def test_why_nothing_can_be_shaped(target, value, message, monkeypatch):
    monkeypatch.setattr(shaped_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(shaped_hosts.shutil, "which", lambda tool: tool)
    assert cannot_shape() is None
    module, _, name = target.partition(".")
    monkeypatch.setattr(getattr(shaped_hosts, module), name, value)
    assert message in (cannot_shape() or "")
    with pytest.raises(CannotShape, match=message):
        ShapedNetwork(2, "1gbit").__enter__()


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("unshare", "a network namespace was refused: not today"),
        ("tc", r"`nsenter .* tc qdisc add dev eth0 root tbf rate 1gbit .*` failed: not today"),
    ],
)
def test_what_the_kernel_refuses_is_said_and_cleaned_up(tool, message, tmp_path, monkeypatch):
    """A tool that fails stands for a container that allows neither namespaces nor queues."""
    fake = tmp_path / tool
    fake.write_text("#!/bin/sh\necho not today >&2\nexit 2\n")
    fake.chmod(0o755)
    shaped(1, "1gbit")
    assert shutil.which("cat") is not None
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = ShapedNetwork(2, "1gbit")
    ended = []
    end = shaped_hosts._end
    monkeypatch.setattr(shaped_hosts, "_end", lambda ps: ended.extend(ps) or end(ps))
    with pytest.raises(CannotShape, match=message):
        made.__enter__()
    assert ended and all(process.poll() is not None for process in ended)
    assert made.hosts == []
