from __future__ import annotations

import socket

import pytest

from ddp_mnist.cluster.local import free_port
from ddp_mnist.errors import UsageError


def test_a_free_port_is_free_and_not_one_of_those_for_outgoing_connections() -> None:
    port = free_port()
    assert 15000 <= port < 30000
    with socket.socket() as server:
        server.bind(("", port))


def test_a_port_that_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        free = free_port()
        monkeypatch.setattr("ddp_mnist.cluster.local.PORTS", [taken] * 99 + [free])
        assert free_port() == free
        monkeypatch.setattr("ddp_mnist.cluster.local.PORTS", [taken] * 100)
        with pytest.raises(UsageError, match=rf"^ports {taken} to {taken}: no free one was found;"):
            free_port()
