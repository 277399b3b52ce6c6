"""dflash-bench --diagnose: finds the choices of a drafter with which its drafts are accepted best.

Choices are taps, embedding scale, attention within a block, and window. The target answers prompts
plainly. The drafter then drafts at the same positions of these answers, with the choices of its
file and with one choice changed at a time. A change that helps is kept, and others are added to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import native
from ..decoder import Decoder
from ..native import OPTIONS, Drafter, Engine, Error, LoadConfig

N_CTX = 2048
"""Default context of --diagnose, in tokens."""
MAX_CHANGES = 3
"""Largest number of choices of a drafter, such as its taps, that are changed together."""
N_CANDIDATES = 32
"""Number of candidates, with probabilities, that the drafter gives for each position."""
MIN_GAIN, N_ERRORS = 0.01, 2.0
"""Least gain of a change that counts as help: as a share of the score, and in standard errors."""
POOR = 0.25
"""Accepted tokens a draft below which a drafter was probably made for another target."""

Text = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of its answer."""

MEANINGS: dict[str, str] = {
    "draft_tap_shift": "the file's layer numbers are shifted: a layer's input was taken for its "
    "output, or the reverse",
    "draft_embedding_scale": "the file's scale of token embeddings is not the one of the training",
    "draft_attention": "the drafter was trained with other attention within its blocks than the "
    "file says",
    "draft_unwindowed": "the drafter was trained without the sliding window that the file has",
}
"""Sentence for the user about a drafter's file, by the --draft option that improves acceptance."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """Acceptance of drafts with some choices of the drafter changed.

    accepted: accepted tokens of each draft, of n_draft. expected: number of tokens that would be
    accepted if the draft were sampled; trials are compared by `expected`, as it has less noise
    than `accepted`.
    """

    changes: dict[str, Any]
    n_draft: int
    accepted: NDArray[np.int64]
    expected: NDArray[np.float64]

    @property
    def mean(self) -> float:
        """Mean of the accepted tokens of a draft."""
        return float(self.accepted.mean())

    @property
    def score(self) -> float:
        """Mean of the expected accepted tokens of a draft."""
        return float(self.expected.mean())

    @property
    def by_position(self) -> list[float]:
        """Share of the drafts whose tokens were all accepted up to each position."""
        return [float((self.accepted > i).mean()) for i in range(self.n_draft)]

    @property
    def flags(self) -> str:
        """Command-line flags that set the changed choices; empty if all choices are the file's."""
        return " ".join(_flag(name, value) for name, value in self.changes.items())

    def beats(self, other: Trial) -> bool:
        """True if this trial expects more accepted tokens than the other trial, beyond chance."""
        gain = self.expected - other.expected
        error = float(gain.std()) / len(gain) ** 0.5
        return bool(gain.mean() > max(MIN_GAIN * other.score, N_ERRORS * error))

    def to_dict(self) -> dict[str, Any]:
        """Returns the trial for the JSON report."""
        return {
            "changes": self.changes,
            "flags": self.flags,
            "accepted_per_draft": round(self.mean, 3),
            "expected_per_draft": round(self.score, 3),
            "accepted_by_position": [round(share, 3) for share in self.by_position],
            "n_drafts": len(self.accepted),
        }


def answers(decoder: Decoder, prompts: Sequence[Sequence[int]], n_tokens: int) -> list[Text]:
    """Returns the prompts with their greedy plain answers; ValueError if all are too short."""
    texts: list[Text] = []
    for prompt in prompts:
        answer = decoder.generate(prompt, draft="none", max_tokens=n_tokens).tokens
        texts.append((prompt, list(answer)))
    if not any(len(answer) > 1 for _, answer in texts):
        raise ValueError("all answers end after one token: give other prompts with -f")
    return texts


def diagnose(
    decoder: Decoder, path: Path, texts: Sequence[Text], report: Callable[[Trial], None]
) -> tuple[Trial, Trial]:
    """Tries the choices of a drafter. Returns the trial without changes and the best trial.

    decoder: has the target and no drafter. report: called with each trial. Errors: Error from the
    core for a file that does not fit the target as it is.
    """
    model, config = decoder.model, decoder.engine.config

    def tried(changes: dict[str, Any]) -> tuple[Trial, Drafter]:
        own = dataclasses.replace(config, **changes)
        drafter = Drafter(str(path), model, config=own)
        engine = Engine(model, drafter=drafter, config=own)
        sequence = native.Sequence(engine)
        try:
            n_draft = min(engine.max_draft, max(len(answer) for _, answer in texts) - 1)
            trial = Trial(changes, n_draft, *_accepted(sequence, texts, n_draft))
        finally:
            sequence.close()
            engine.close()
        report(trial)
        return trial, drafter

    unchanged, drafter = tried({})
    best = unchanged
    for _ in range(MAX_CHANGES):
        trials = [unchanged]
        for change in _changes(drafter, config, best.changes):
            with contextlib.suppress(Error):  # a shifted tap may not exist in the target
                trials.append(tried(best.changes | change)[0])
        top = max(trials, key=lambda trial: trial.score)
        if not top.beats(best):
            break
        best = top
    return unchanged, best


def conclusion(unchanged: Trial, best: Trial) -> str:
    """Says which choices of the drafter are the best, and what they suggest about its file."""
    if best is not unchanged:
        meaning = "; ".join(MEANINGS[name] for name in best.changes)
        return (
            f"best: {best.flags}, {best.mean:.2f} instead of {unchanged.mean:.2f} accepted tokens "
            f"a draft ({best.score:.2f} instead of {unchanged.score:.2f} expected): {meaning}. "
            "Load the pair with these flags, or correct the file."
        )
    if unchanged.mean < POOR:
        return (
            f"no choice helps: {unchanged.mean:.2f} accepted tokens a draft; the drafter was "
            "probably made for another model or variant (base or instruct), or for other prompts "
            "(--chat, --think, -f)"
        )
    return f"best: the choices of the file, {unchanged.mean:.2f} accepted tokens a draft"


def _flag(name: str, value: object) -> str:
    flag = OPTIONS[name].flags[0]
    return flag if value is True else f"{flag} {value}"


def _changes(
    drafter: Drafter, config: LoadConfig, made: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yields changes of one more choice each. made: changes so far. drafter: without changes."""
    now = {name: made.get(name, getattr(config, name)) for name in MEANINGS}
    for name, value in (
        ("draft_tap_shift", now["draft_tap_shift"] + 1),
        ("draft_tap_shift", now["draft_tap_shift"] - 1),
        *(
            ("draft_embedding_scale", word)
            for word, scale in (("raw", 1.0), ("sqrt", drafter.sqrt_scale))
            if not math.isclose(scale, drafter.embedding_scale, rel_tol=0.01)
        ),
        ("draft_attention", "causal" if drafter.n_causal < drafter.n_layer else None),
        ("draft_attention", "bidirectional" if drafter.n_causal else None),
        ("draft_unwindowed", True if drafter.n_windowed else None),
    ):
        if name not in made and value not in (None, now[name]):
            yield {name: value}


def _accepted(
    sequence: native.Sequence, texts: Sequence[Text], n_draft: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Drafts n_draft tokens after each token of the answers.

    Returns the accepted tokens of each draft, and the expected ones: the sum of the drafter's
    probabilities of the answer's next 1, 2, ... n_draft tokens.
    """
    accepted, expected = [], []
    for prompt, answer in texts:
        sequence.reset()
        sequence.prefill(prompt).argmax()
        for at in range(len(answer) - n_draft):
            draft = sequence.draft(answer[at], n_draft, N_CANDIDATES)
            is_right = draft.tokens == np.asarray(answer[at + 1 : at + 1 + n_draft])[:, None]
            accepted.append(is_right[:, 0].cumprod().sum())
            # The last candidate's probability is an upper bound for a token that is no candidate.
            logits = np.where(is_right, draft.logits, -np.inf).max(axis=1)
            log_probs = np.maximum(logits, draft.logits[:, -1]) - draft.log_sum_exp
            expected.append(np.nan_to_num(np.exp(log_probs.cumsum())).sum())
            sequence.decode(answer[at]).argmax()
    return np.asarray(accepted), np.asarray(expected)
