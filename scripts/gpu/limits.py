"""Counts the bytes that a round must move, which bound its time by the device's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_gguf.convert.gguf_header import read_header

from dflash_gguf import native


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that a sequence's rounds read or write, by kind.

    cache: K/V of the positions so far. state: recurrent states. trace: node updates of one row.
    draft: the drafter's weights, its cache and the output head. state, trace: bytes of one read or
    write.
    """

    weights: int
    cache: int
    state: int
    trace: int
    draft: int

    @classmethod
    def of(cls, sequence: native.Sequence) -> Moved:
        """Counts the bytes at the sequence's position, without activations and with all experts."""
        engine = sequence.engine
        model, drafter = engine.model, engine.drafter
        draft = 0
        if drafter is not None:
            window = min(1.0, sequence.position / max(model.config.draft_window, 1))
            draft = (
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
        """Bytes of a plain step, which reads and writes the recurrent states."""
        return self.weights + self.cache + 2 * self.state

    def drafted(self, n_rows: int) -> int:
        """Returns the bytes of a drafted round of n rows; verify and commit read the states."""
        return self.draft + self.weights + self.cache + 3 * self.state + 2 * self.trace * n_rows


def head_bytes(path: str, *, tied: bool) -> int:
    """Returns the bytes of a file's output head, 0 if none. tied: embeddings may be the head."""
    tensors = read_header(Path(path)).tensors
    for name in ("output.weight", "token_embd.weight")[: 2 if tied else 1]:
        if name in tensors:
            return tensors[name].n_bytes
    return 0


def share_of_limit(n_bytes: int, gb_per_s: float, milliseconds: float) -> float:
    """Returns the time that n_bytes need at full bandwidth, as a share of the measured time."""
    return n_bytes / (gb_per_s * 1e6) / milliseconds
