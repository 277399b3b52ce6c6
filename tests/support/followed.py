"""Sequences that follow known tokens, to compare drafts at any position with a reference."""

from __future__ import annotations

from typing import Any

import numpy as np
from device import DEVICE
from numpy.typing import NDArray

from dflash_gguf.native import Sequence

# Largest error relative to the range of the logits. Observed: up to 4e-6.
LIMIT = 1e-4 if DEVICE is None else 2e-3


def assert_close(found: NDArray[Any], expected: NDArray[Any], what: str = "") -> None:
    error = np.abs(found - expected).max() / np.ptp(expected)
    print(f"{what}: {error:.1e}")
    assert error <= LIMIT, what


class Followed:
    """A sequence that follows `tokens`."""

    tokens: list[int]
    sequence: Sequence

    @property
    def position(self) -> int:
        return self.sequence.position

    def prefill(self, n: int) -> None:
        self.sequence.prefill(self.tokens[self.position : self.position + n])

    def round(self, n_accepted: int, n_rows: int) -> None:
        """Verifies n_rows rows, of which n_accepted are right, and commits these."""
        right = self.tokens[self.position : self.position + n_accepted]
        self.sequence.verify([*right, *[5] * (n_rows - n_accepted)])
        self.sequence.commit(n_accepted)
