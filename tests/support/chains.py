"""Plain decoding and chain drafting written with native.Sequence only."""

from __future__ import annotations

from collections.abc import Callable

from dflash_gguf.native import Sequence

# Returns the tokens to verify for the drafted tokens and the number of tokens so far.
Propose = Callable[[list[int], int], list[int]]


def plain(sequence: Sequence, prompt: list[int], n: int) -> list[int]:
    sequence.reset()
    tokens = [sequence.prefill(prompt).argmax()]
    while len(tokens) < n:
        tokens.append(sequence.decode(tokens[-1]).argmax())
    return tokens


def run_round(sequence: Sequence, root: int, drafts: list[int]) -> list[int]:
    """Verifies and commits a draft; returns the accepted tokens and the target's next one."""
    rows = sequence.verify([root, *drafts])
    new = [rows.argmax(0)]
    while len(new) <= len(drafts) and new[-1] == drafts[len(new) - 1]:
        new.append(rows.argmax(len(new)))
    sequence.commit(len(new))
    return new


def chain(
    sequence: Sequence, prompt: list[int], n: int, n_draft: int, propose: Propose | None = None
) -> tuple[list[int], list[int]]:
    """Decodes at least n tokens with chains; returns them and the accepted drafts per round."""
    sequence.reset()
    tokens = [sequence.prefill(prompt).argmax()]
    accepted = []
    while len(tokens) < n:
        drafts = sequence.draft(tokens[-1], n_draft)[0][:, 0].tolist()
        if propose is not None:
            drafts = propose(drafts, len(tokens))
        new = run_round(sequence, tokens[-1], drafts)
        accepted.append(len(new) - 1)
        tokens += new
    return tokens, accepted


def spoiled(known: list[int], n_draft: int, random: Callable[[int], int], n_vocab: int) -> Propose:
    """Proposes n_draft tokens of a known continuation that turn wrong at a random index."""

    def propose(_drafts: list[int], n_tokens: int) -> list[int]:
        right = known[n_tokens : n_tokens + n_draft]
        place = random(n_draft + 1)
        return [
            token if i < place else (token + 1) % n_vocab
            for i, token in enumerate(right + [0] * (n_draft - len(right)))
        ]

    return propose
