"""Lanes: who connects, who is turned away, and what all agree on when a rank cannot."""

from __future__ import annotations

import socket
import threading
import time
import warnings

import pytest
import torch.distributed as dist

from tests.comm.test_lanes import lanes_on
from tests.comm.test_lanes_failures import around_the_ring, failure
from tpkernels.comm import lanes_connecting
from tpkernels.comm.lanes import lanes_of, why_not
from tpkernels.errors import TPKernelsWarning

WELL_FORMED = lanes_connecting._GREETING.pack(3, 0, b"guessed")


def with_strangers(group):
    """They come first: one says nothing, one too little, others what a rank would say."""
    real = lanes_connecting._listener
    strangers = []

    def listener(backlog):
        made = real(backlog)
        for said in (b"", b"GET", WELL_FORMED, WELL_FORMED + b"more"):
            strangers.append(socket.create_connection(made.getsockname()))
            strangers[-1].sendall(said)
        strangers[1].close()
        return made

    made = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_connecting, "_listener", listener)
        began = time.monotonic()
        lanes = lanes_on(made)
        assert time.monotonic() - began < lanes_connecting.CONNECTING_SECONDS / 2
    around_the_ring(lanes).wait()
    for stranger in (strangers[0], strangers[2]):
        stranger.settimeout(10)
        assert ended(stranger)


def ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_turned_away_and_delay_nobody(pool):
    pool.run(with_strangers)


def no_lanes_for(group, change):
    """Why there are none, with ``change`` made on rank 1 (which listens and connects)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_connecting, "CONNECTING_SECONDS", 1.0)
        name = dist.new_group().group_name
        if group.rank() == 1:
            change(patch)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert lanes_of(name, even_on_one_host=True) is None
        ours = [each for each in warned if each.category is TPKernelsWarning]
        assert len(ours) == (group.rank() == 0)
        began = time.monotonic()
        assert lanes_of(name, even_on_one_host=True) is None
        assert time.monotonic() - began < 0.1  # not tried again
    return why_not(name)


def has_no_interface(patch):
    patch.setenv("GLOO_SOCKET_IFNAME", "none0")


def connect_at(port):
    """Instead of where the other rank listens."""
    real = lanes_connecting._connected
    return lambda place, *rest: real([*place[:2], port], *rest)


def finds_nobody(patch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        patch.setattr(lanes_connecting, "_connected", connect_at(probe.getsockname()[1]))


def finds_an_impostor(patch):
    impostor = socket.create_server(("127.0.0.1", 0))
    port = impostor.getsockname()[1]

    def answer():
        for _ in range(2):
            impostor.accept()[0].sendall(b"x" * lanes_connecting._ANSWER_BYTES)

    threading.Thread(target=answer, daemon=True).start()
    patch.setattr(lanes_connecting, "_connected", connect_at(port))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (has_no_interface, "rank 1: it cannot listen: GLOO_SOCKET_IFNAME='none0' has no address"),
        (finds_nobody, "rank 1: it cannot connect to rank 0 at 127.0.0.1 port "),
        (finds_an_impostor, "rank 1: who listens at the place of rank 0 is not of this group"),
    ],
)
def test_one_rank_that_cannot_leaves_all_without(pool, change, said):
    reasons = pool.run(no_lanes_for, change)
    assert len(set(reasons)) == 1
    assert said in reasons[0], reasons[0]


def comes_late(group):
    made = dist.new_group()
    if group.rank() == 1:
        time.sleep(2.0)
        lanes_of(made.group_name)
        return None
    return failure(lambda: lanes_of(made.group_name))


def test_a_rank_that_does_not_come_is_named(pool):
    results = pool.run(comes_late, env={"TPKERNELS_TIMEOUT": "1"})
    for message, seconds in (results[0], results[2], results[3]):
        assert message.startswith("lanes: rank ") and "no sign of rank 1" in message
        assert seconds < 5


def test_the_address_is_that_of_the_interface_gloo_uses(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert lanes_connecting.own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    with pytest.raises(OSError, match="GLOO_SOCKET_IFNAME='none0'"):
        lanes_connecting.own_address()


def test_a_name_that_is_loopback_is_not_taken_where_another_address_is_known(monkeypatch):
    """As on Debian, whose hosts resolve their own name to 127.0.1.1."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")
    assert lanes_connecting.own_address() == (socket.AF_INET, "127.0.0.1")
    monkeypatch.delenv("MASTER_ADDR")
    assert lanes_connecting.own_address()[1] in ("127.0.0.1", "::1")
