import socket

import pytest

from ddp_mnist.cluster import interfaces
from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.errors import UsageError


def test_a_free_port_is_free_and_not_one_of_those_for_outgoing_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port()
    assert 15000 <= port < 30000
    with socket.socket() as server, socket.socket() as other:
        server.bind(("", port))
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert interfaces.why_port_is_taken(taken) == "Address already in use"
        monkeypatch.setattr("ddp_mnist.cluster.local_world.PORTS", [taken] * 100)
        with pytest.raises(UsageError, match=rf"^ports {taken} to {taken}: no free one was found;"):
            free_port()
