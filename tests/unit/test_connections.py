"""Which connection gives way when too many are open."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dflash_gguf.serve.listen import Connections


@dataclass(eq=False)
class Transport:
    is_aborted: bool = False

    def abort(self) -> None:
        self.is_aborted = True


@dataclass(eq=False)
class Fake:
    address: str
    lacks_request: bool = True
    transport: Transport = field(default_factory=Transport)


def test_the_oldest_idle_one_of_the_most_frequent_address_gives_way() -> None:
    connections: Any = Connections(5)
    flood = [Fake("a") for _ in range(3)]
    honest = [Fake("b"), Fake("c")]
    flood[0].lacks_request = False  # its answer is being made
    for one in [honest[0], *flood, honest[1]]:
        assert connections.add(one)
    for n in range(20):
        assert connections.add(Fake("a"))
        assert flood[1].transport.is_aborted
        assert flood[2].transport.is_aborted == (n > 0)
    assert not any(one.transport.is_aborted for one in [*honest, flood[0]])


def test_connections_with_requests_keep_their_places() -> None:
    connections: Any = Connections(2)
    busy = [Fake("a", lacks_request=False), Fake("b", lacks_request=False)]
    assert all(connections.add(one) for one in busy)
    late = Fake("c")
    assert not connections.add(late)
    connections.discard(late)  # it was never added
    connections.discard(busy[0])
    connections.discard(busy[0])
    assert connections.add(late)
    assert not connections.add(Fake("d")) or late.transport.is_aborted
