"""Turns: selects the waiting request that gets a sequence next, and the running one that loses it.

Clients take turns: with n other clients, a request's first token comes within a second plus n times
what the request's own prompt takes alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from .request import RequestState

TURN_S = 1.0
"""Seconds of work after which a request gives its place to a client with fewer running requests."""
LATE_TURN_S = 0.1
"""Replaces TURN_S while another client's request has waited TURN_S / 2 for its first token."""


class Turns:
    """The order in which the clients of unfinished requests were served."""

    def __init__(self) -> None:
        self._n = 0
        # Serial number of each client's last turn; a new client gets that of the newest turn.
        self._last: dict[str, int] = {}

    def add(self, client: str) -> None:
        """Puts a client that had no unfinished request behind those who wait."""
        self._last[client] = self._n

    def served(self, state: RequestState, states: Sequence[RequestState]) -> None:
        """Puts a request's client behind all others. states: all unfinished requests."""
        clients = {x.request.client for x in states}
        self._n += 1
        self._last = {x: n for x, n in self._last.items() if x in clients}
        self._last[state.request.client] = state.turn = self._n

    def next(
        self, waiting: Sequence[RequestState], running: Sequence[RequestState]
    ) -> RequestState:
        """Returns the oldest waiting request of the client whose turn it is.

        That client has the fewest running requests, and was not served for the longest time.
        """
        n_running = Counter(state.request.client for state in running)
        return min(
            waiting, key=lambda x: (n_running[x.request.client], self._last[x.request.client])
        )

    def over(
        self,
        following: RequestState,
        waiting: Sequence[RequestState],
        running: Sequence[RequestState],
    ) -> RequestState | None:
        """Returns a running request whose turn is over, for the request that follows; else None.

        A turn ends only if the client of the following request has fewer running requests. The turn
        of a throttled request, whose steps nobody reads, is over at once.
        """
        n_running = Counter(state.request.client for state in running)
        fewest = n_running[following.request.client]
        due = [(0.0, state) for state in running if state.is_throttled]
        rivals = [state for state in running if n_running[state.request.client] > fewest]
        if rivals:
            now = time.perf_counter()
            late = [
                len(state.history)
                for state in waiting
                if not state.output.tokens
                and now - state.added >= TURN_S / 2
                and n_running[state.request.client] == fewest
            ]
        for state in rivals:
            # The time of a turn starts at the first token that no earlier turn computed; otherwise
            # computing lost tokens again could use up the turn without progress.
            if state.turn_began is None and state.sequence.position > state.n_reached:
                state.turn_began = now
            # A late request displaces one that has its first token, or has more left before it.
            gives_way = late and (state.output.tokens or state.n_uncomputed > min(late))
            turn_s = LATE_TURN_S if gives_way else TURN_S
            if state.turn_began is not None and now - state.turn_began >= turn_s:
                due.append((state.turn_began, state))
        return min(due, key=lambda x: x[0])[1] if due else None
