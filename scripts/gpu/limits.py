"""Counts the bytes that a round must move, which give its minimum time at full bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_gguf.convert.gguf_header import read_header

from dflash_gguf import native


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a round of one sequence reads or writes.

    weights: the target's. cache: its K/V of the positions so far. state: one read or write of all
    recurrent states. trace: one read or write of one row's node updates. draft: the drafter's
    weights, its K/V and the output head.
    """

    weights: int
    cache: int
    state: int
    trace: int
    draft: int

    @classmethod
    def of(cls, sequence: native.Sequence) -> Moved:
        """Counts a round's bytes at a sequence's position: no activations, but all experts."""
        engine = sequence.engine
        model, draft = engine.model, 0
        for drafter in engine.drafters:
            window = min(1.0, sequence.position / max(model.config.draft_window, 1))
            draft += (
                drafter.copied_bytes + drafter.mapped_bytes + int(engine.bytes_of("draft") * window)
            )
            if head_bytes(drafter.path, tied=False) == 0:
                draft += head_bytes(model.path, tied=True)
        return cls(
            weights=model.copied_bytes + model.mapped_bytes,
            cache=int(engine.bytes_of("kv") * sequence.position / sequence.n_ctx),
            state=engine.bytes_of("recurrent"),
            trace=engine.bytes_of("trace") // max(engine.max_verify, 1),
            draft=draft,
        )

    @property
    def plain(self) -> int:
        """Bytes of a plain step; it reads and writes the recurrent states."""
        return self.weights + self.cache + 2 * self.state

    def drafted(self, n_rows: int) -> int:
        """Returns the bytes of a round that verifies n_rows; its commit reads the states again."""
        return self.draft + self.weights + self.cache + 3 * self.state + 2 * self.trace * n_rows


def head_bytes(path: str, *, tied: bool) -> int:
    """Returns the bytes of a file's output head, or 0. tied: token embeddings count as a head."""
    tensors = read_header(Path(path)).tensors
    for name in ("output.weight", "token_embd.weight")[: 2 if tied else 1]:
        if name in tensors:
            return tensors[name].n_bytes
    return 0


def share_of_limit(n_bytes: int, gb_per_s: float, milliseconds: float) -> float:
    """Returns the time of moving n_bytes at full bandwidth, as a share of a measured time."""
    return n_bytes / (gb_per_s * 1e6) / milliseconds
