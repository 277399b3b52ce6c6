"""How much of the prompts that come in joins the rounds of those who decode."""

from __future__ import annotations

from ..speculative.cost_model import RunningMedian

CHUNKS = (32, 64, 128, 256, 512)
"""Tokens of prompts that may join the others' rounds: few sizes, as each has a graph of its own."""
MAX_DECODE_SLOWDOWN = 1.86
"""Times as long as without prompts that rounds may take on average while one comes in.

Rounds between pieces take a twentieth longer too, which is not counted, as pieces drive weights out
of the caches. So four plain answers on 2 cores keep a little more than half of their speed, and a
prompt of some thousand tokens takes 2.2 to 2.4 times what it takes alone.
"""
MIN_CHUNK, MIN_QUICK_CHUNK = CHUNKS[0], 128
"""Tokens that join at least, once the others have time saved up: the latter where that is quick.

Pieces of 128 read weights and keys a quarter as often as those of 32: with SmolLM2 Q8_0 4,096
tokens in such pieces cost the others 1.1 times what they take alone, else 1.3 times.
"""
QUICK_S = 0.2
"""How much longer a round may take for it: a pause that readers of a stream bear."""
MAX_MIXED_ROUNDS = 16
"""Rounds with pieces of prompts before one without."""
MAX_WAITING_ROUNDS = 128
"""Rounds that prompts wait at most after a piece, whatever that took.

Real pieces were followed by 87 at most (SmolLM2 Q4_1 beside one answer, on 2 cores). What is
beyond, something else took of the machine: a computer that slept for an hour would keep them
waiting for another.
"""


class PrefillBudget:
    """Learns what rounds take with pieces of prompts, and without."""

    def __init__(self) -> None:
        self._alone = RunningMedian()  # of rounds without prompts
        self._row = RunningMedian()  # of a row of a prompt among others
        self._n_mixed = 0  # rounds with prompts since one without
        self._saved_s = 0.0  # that pieces of prompts may take longer, as others took less
        self._run_sizes: set[int] = set()  # whose graphs are there
        self._weight = 1.0  # of those who wait for their prompts against one who decodes

    def chunk(self, n_decoding: int = 1, n_filling: int = 1) -> int:
        """How much of prompts joins those who decode in this round: none while they wait too long.

        Nor where it is long ago that they ran alone, which is what they are compared with. Where
        more wait for their prompts than decode, rounds may take longer by as much.
        """
        self._weight = max(1.0, n_filling / n_decoding)
        if self._saved_s < 0.0 or self._n_mixed >= MAX_MIXED_ROUNDS:
            return 0
        most_s = self._weight * (MAX_DECODE_SLOWDOWN - 1.0) * self._alone.value
        row_s = self._row.value
        if not row_s:
            return MIN_CHUNK

        def takes_at_most(seconds: float) -> int:
            return max([n for n in CHUNKS if n * row_s <= seconds], default=MIN_CHUNK)

        return max(takes_at_most(most_s), min(takes_at_most(QUICK_S), MIN_QUICK_CHUNK))

    def observe(self, seconds: float, n_filled: int) -> None:
        """A round in which some decoded: what it took, and how many tokens of prompts it had."""
        self._n_mixed = self._n_mixed + 1 if n_filled else 0
        if not n_filled:
            self._alone.add(seconds)
        alone_s = self._alone.value
        more_s = max(seconds - alone_s, 0.0) if n_filled else 0.0
        granted_s = self._weight * (MAX_DECODE_SLOWDOWN - 1.0) * alone_s
        is_first = n_filled not in self._run_sizes  # which builds a graph, once
        charged_s = min(more_s, n_filled * self._row.value) if is_first else more_s
        saved_s = min(self._saved_s + granted_s - charged_s, max(alone_s, granted_s))
        self._saved_s = max(saved_s, -MAX_WAITING_ROUNDS * granted_s)
        if more_s and not is_first:
            self._row.add(more_s / n_filled)
        self._run_sizes.add(n_filled)
