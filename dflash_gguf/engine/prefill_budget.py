"""Token budget of chunked prefill beside decoding requests."""

from __future__ import annotations

from ..speculative.cost_model import RunningMedian

CHUNKS = (32, 64, 128, 256, 512)
"""Sizes of prefill chunks in tokens; few sizes, as each needs a graph of its own."""
MAX_DECODE_SLOWDOWN = 1.86
"""Maximum mean duration of decoding rounds during a prefill, relative to rounds without prefill.
Four requests on 2 CPU cores keep half of their speed with this value."""
MIN_CHUNK, MIN_QUICK_CHUNK = CHUNKS[0], 128
"""Minimum tokens of a prefill chunk: the second number if that many take at most QUICK_S."""
QUICK_S = 0.2
"""Acceptable pause of streams in seconds for a prefill chunk of MIN_QUICK_CHUNK tokens."""
MAX_MIXED_ROUNDS = 16
"""Maximum consecutive rounds with prefill, so that rounds without prefill are measured again."""
MAX_WAITING_ROUNDS = 128
"""Maximum rounds that prefill waits after a slow chunk. Chunks cause waits of up to 87 rounds; only
a chunk during which the computer was suspended would cause a far longer wait."""


class PrefillBudget:
    """Decides how many prompt tokens join rounds of decoding requests, by measured durations."""

    def __init__(self) -> None:
        # _alone: seconds of a round without prefill. _row: seconds that a prompt token adds.
        # _n_mixed: consecutive rounds with prefill. _saved_s: seconds that chunks may still add to
        # rounds. _run_sizes: chunk sizes with a graph. _weight: factor of the allowed slowdown.
        self._alone = RunningMedian()
        self._row = RunningMedian()
        self._n_mixed = 0
        self._saved_s = 0.0
        self._run_sizes: set[int] = set()
        self._weight = 1.0

    def chunk(self, n_decoding: int = 1, n_filling: int = 1) -> int:
        """Returns the number of prompt tokens that may join the next round of decoding requests.

        Returns 0 while chunks have used up the allowed slowdown, and after MAX_MIXED_ROUNDS rounds.
        The allowed slowdown grows with n_filling / n_decoding if more requests prefill than decode.
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
        """Records the seconds of a decoding round that had n_filled prompt tokens."""
        self._n_mixed = self._n_mixed + 1 if n_filled else 0
        if not n_filled:
            self._alone.add(seconds)
        alone_s = self._alone.value
        more_s = max(seconds - alone_s, 0.0) if n_filled else 0.0
        granted_s = self._weight * (MAX_DECODE_SLOWDOWN - 1.0) * alone_s
        is_first = n_filled not in self._run_sizes  # the first chunk of a size builds a graph
        charged_s = min(more_s, n_filled * self._row.value) if is_first else more_s
        saved_s = min(self._saved_s + granted_s - charged_s, max(alone_s, granted_s))
        self._saved_s = max(saved_s, -MAX_WAITING_ROUNDS * granted_s)
        if more_s and not is_first:
            self._row.add(more_s / n_filled)
        self._run_sizes.add(n_filled)
