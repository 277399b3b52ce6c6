"""The bytes that a round cannot do without, which bound its time by the device's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dflash_gguf.convert.gguf_header import read_header

from dflash_gguf import native


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of each thing that is read or written once.

    cache: K/V of the positions so far. state: of the recurrent layers, one way. trace: of a row,
    one way. draft: the drafter's weights and cache, and the head it shares or has.
    """

    weights: int
    cache: int
    state: int
    trace: int
    draft: int

    @classmethod
    def of(cls, sequence: native.Sequence) -> Moved:
        """Counts the bytes at the sequence's position, without activations, with all experts."""
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
        """Returns the bytes of a plain step: the state is read and written."""
        return self.weights + self.cache + 2 * self.state

    def drafted(self, n_rows: int) -> int:
        """Returns the bytes of a round of n rows; its commit reads and writes the state again."""
        return self.draft + self.weights + self.cache + 3 * self.state + 2 * self.trace * n_rows


def head_bytes(path: str, *, tied: bool) -> int:
    """Bytes of a file's head; tied: token embeddings where there is none. 0 for neither."""
    tensors = read_header(Path(path)).tensors
    for name in ("output.weight", "token_embd.weight")[: 2 if tied else 1]:
        if name in tensors:
            return tensors[name].n_bytes
    return 0


def share_of_limit(n_bytes: int, gb_per_s: float, milliseconds: float) -> float:
    """The least time that moving the bytes can take by the time that it took."""
    return n_bytes / (gb_per_s * 1e6) / milliseconds
