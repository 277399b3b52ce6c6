"""Decides the scale of a drafter's token embeddings where its file leaves the scale open."""

from __future__ import annotations

from collections.abc import Callable

N_DRAFTS = 16
"""Drafts with each scale before the better scale is kept."""


class ScaleTrial:
    """Drafts with two scales in turn, then keeps the scale of which more tokens are accepted."""

    def __init__(self, set_scale: Callable[[float], None], scales: tuple[float, float]) -> None:
        """set_scale: sets the scale of later drafts. scales: the first is kept if they tie."""
        self._set, self._scales = set_scale, scales
        self._counts, self._sums, self._now = [0, 0], [0, 0], 0
        self.choice: int | None = None

    def begin(self) -> None:
        """Sets the scale of the next drafts; once it is decided, nothing changes."""
        if self.choice is None:
            self._now = int(self._counts[1] < self._counts[0])
            self._set(self._scales[self._now])

    def observe(self, n_accepted: int) -> bool:
        """Counts the accepted tokens of a draft; True if this draft has decided the scale."""
        if self.choice is not None:
            return False
        self._counts[self._now] += 1
        self._sums[self._now] += n_accepted
        if min(self._counts) < N_DRAFTS:
            return False
        means = [total / n for total, n in zip(self._sums, self._counts, strict=True)]
        self.choose(int(means[1] > means[0]))
        return True

    def choose(self, choice: object) -> None:
        """Decides the embedding scale. choice: index in the two scales; ValueError if not 0, 1."""
        if choice not in (0, 1):
            raise ValueError(f"scale {choice!r} is not 0 or 1")
        self.choice = int(bool(choice))
        self._set(self._scales[self.choice])
