"""dflash-bench --replay: computes the speed of settings from recorded drafts and measured costs.

An answer is decoded once, and the drafts before each of its tokens are recorded. Every setting is
then simulated on this record, so that settings differ by their choices and not by timing noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import native
from ..config import DecodeConfig
from ..native import Draft
from ..sampling.noise import DraftScorer
from ..speculative.controller import ControllerState
from ..speculative.cost_model import CostModel, Round
from ..speculative.proposers.dflash import N_RANKED, DFlash
from ..speculative.proposers.proposer import Proposer, SpeculativeState
from ..speculative.speculator import Speculator
from .settings import Setting


@dataclass(frozen=True, slots=True)
class Record:
    """A greedy answer. drafts[i]: drafts by their length, made just before token i + 1."""

    n_prompt: int
    tokens: list[int]
    drafts: Sequence[Mapping[int, Draft]]


def record(
    sequence: native.Sequence, prompt: Sequence[int], n_tokens: int, lengths: Sequence[int]
) -> Record:
    """Decodes n_tokens tokens, and records a draft of each length before each next token."""
    sequence.reset()
    tokens, drafts = [sequence.prefill(prompt).argmax()], []
    while len(tokens) < n_tokens:
        drafts.append({n: sequence.draft(tokens[-1], n, N_RANKED) for n in lengths})
        tokens.append(sequence.decode(tokens[-1]).argmax())
    return Record(len(prompt), tokens, drafts)


class _Drafter:
    """Replays recorded drafts; shortens the next longer draft for a length not recorded."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self.max_draft = max(record.drafts[0])
        self.at = 0

    def draft(self, last_token: int, n_draft: int, k: int = 1, drafter: int = 0) -> Draft:  # noqa: ARG002
        known = self._record.drafts[self.at]
        draft = known[min(n for n in known if n >= n_draft)]
        return Draft(
            draft.tokens[:n_draft, :k], draft.logits[:n_draft, :k], draft.log_sum_exp[:n_draft]
        )


def play(
    record: Record,
    setting: Setting,
    costs: CostModel,
    state: ControllerState,
    proposer: Proposer,
    max_nodes: int,
) -> tuple[float, list[Round]]:
    """Simulates a setting on a record. Returns the seconds it would have taken, and its rounds.

    state, proposer: both learn. max_nodes: largest tree of "auto".
    """
    drafter = _Drafter(record)
    speculator = None
    if (controller := setting.controller(state, drafter.max_draft, max_nodes)) is not None:
        speculator = Speculator([proposer], controller)
    rounds: list[Round] = []
    request = SpeculativeState(drafter, [], DraftScorer(DecodeConfig()))
    while drafter.at < len(record.drafts):
        at = drafter.at
        done = Round(record.n_prompt + at)
        request.history, coming = record.tokens[: at + 1], record.tokens[at + 1 :]
        request.n_left, request.n_room = len(record.drafts) - at, max_nodes + 1
        if speculator is not None:
            speculator.propose(done, (request,))
        if request.tree is not None:
            done.n_accepted = len(request.tree.accepted(coming)) - 1
        done.n_tokens = done.n_accepted + 1
        if done.n_positions:
            done.draft_s = costs.draft_s(proposer.name, done.n_draft_rows, done.is_top1)
        done.pass_s = costs.pass_s(done.position, done.n_rows, done.is_tree)
        if speculator is not None:
            speculator.observe(done, (request,), (coming[: done.n_tokens],))
        rounds.append(done)
        drafter.at += done.n_tokens
    return sum(done.seconds for done in rounds), rounds


def evaluate(
    records: Sequence[Record],
    settings: Sequence[Setting],
    costs: CostModel,
    max_nodes: int,
    kind: type[DFlash] = DFlash,
) -> dict[str, list[float]]:
    """Returns tokens per second by setting, for each record. "auto" learns across records.

    kind: proposer of the drafter that made the records' drafts.
    """
    speeds: dict[str, list[float]] = {}
    for setting in settings:
        state = ControllerState(CostModel.from_dict(costs.to_dict()))
        proposer = kind(max(records[0].drafts[0]))
        seconds = [
            play(record, setting, costs, state, proposer, max_nodes)[0] for record in records
        ]
        speeds[str(setting)] = [
            len(record.drafts) / s for record, s in zip(records, seconds, strict=True)
        ]
    return speeds


def against_best(speeds: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns for each record the speed of "auto" divided by that of the best other setting."""
    fixed = [values for name, values in speeds.items() if name != "auto"]
    best = [max(values) for values in zip(*fixed, strict=True)]
    return [auto / top for auto, top in zip(speeds["auto"], best, strict=True)]
