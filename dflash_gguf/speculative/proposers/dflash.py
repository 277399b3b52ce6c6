"""The DFlash draft model as a proposer: candidates for all positions of a block in one pass."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...native import Draft
from ...sampling.noise import DraftScorer, noise_of
from ...text.stream import n_common
from ..calibration import Calibration, Calibrations, Features
from ..ddtree import PositionCandidates, best_first_tree, chain
from ..tree import Tree
from .embedding_scale import ScaleTrial
from .proposer import CHAIN, MAIN_CHAIN, TOP1, Proposer, SpeculativeState, draft_for_all

N_RANKED = 32
"""Candidates that a ranked draft takes from the draft model for each position."""


class _Batch:
    """Drafts of several requests that were ranked together; their rows follow one another."""

    def __init__(
        self, calibration: Calibration, features: Features, tokens: NDArray[np.int64]
    ) -> None:
        self.calibration, self.features, self.tokens = calibration, features, tokens
        self.best: list[int] = tokens[:, 0].tolist()

    def observe(self, outcomes: Sequence[tuple[int, Sequence[int]]]) -> None:
        counts = [len(taken) for _, taken in outcomes]
        rows = [first + at for first, taken in outcomes for at in range(len(taken))]
        tokens = np.array([token for _, taken in outcomes for token in taken])
        is_it = self.tokens[rows] == tokens[:, None]
        places = np.where(is_it.any(axis=1), is_it.argmax(axis=1), is_it.shape[1]).tolist()
        self.calibration.observe(self.features, places, rows, counts)


class _Ranked(NamedTuple):
    batch: _Batch
    first: int
    n: int


class DFlash(Proposer):
    """Proposes candidates of the DFlash draft model, with probabilities learned from outcomes.

    A top-1 draft takes the best logit of each position; its probabilities are recent acceptance
    rates. A ranked draft orders the candidates by calibrated probability, after bans, penalties and
    the target's sampling noise, which is known before the target samples.
    """

    name = "dflash"
    samples = False
    """True if drafts follow the tokens that the requests' samplers are predicted to sample."""

    def __init__(
        self, max_draft: int, drafter: int = 0, scale_trial: ScaleTrial | None = None
    ) -> None:
        """Creates the proposer. drafter: index of the engine's drafter."""
        self.max_draft, self._drafter = max_draft, drafter
        self.calibrations = Calibrations()
        self._scale_trial = scale_trial
        self._outcomes: list[tuple[_Ranked, Sequence[int]]] = []

    def propose(self, requests: Sequence[SpeculativeState]) -> list[Tree | None]:
        """Drafts for all requests; a request with non-finite scores gets None and a warning."""
        self._learn_outcomes()
        if self._scale_trial is not None:
            self._scale_trial.begin()
        widths = [self._width(request) for request in requests]
        drafts = draft_for_all(requests, widths, self._drafter, samples=self.samples)
        trees: dict[SpeculativeState, Tree] = {}
        # Requests and drafts by sampling settings, to be ranked together; None: top-1 drafts.
        groups: dict[object, list[tuple[SpeculativeState, Draft]]] = {}
        for request, draft in zip(requests, drafts, strict=True):
            ranking_class = None if request.shape == TOP1 else _ranking_class(request.scorer)
            groups.setdefault(ranking_class, []).append((request, draft))
        for ranking_class, group in groups.items():
            finite = _finite(group)
            if ranking_class is None:
                for request, draft in finite:
                    trees[request] = self._brief(request, draft)
            elif finite:
                for (request, draft), candidates in zip(finite, self._ranked(finite), strict=True):
                    trees[request] = self._tree(request, draft, candidates)
        return [trees.get(request) for request in requests]

    def observe(
        self, requests: Sequence[SpeculativeState], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Updates the top-1 acceptance rates, and keeps ranked outcomes for the calibration."""
        for request, chosen in zip(requests, tokens, strict=True):
            note = request.notes.pop(self.name, None)
            if note is None:
                continue
            acceptance = self.calibrations.top1(request.scorer.config)
            best = note
            if isinstance(note, _Ranked):
                best = note.batch.best[note.first : note.first + note.n]
                self._outcomes.append((note, chosen[: note.n]))
            acceptance.observe(best, chosen)
            if self._scale_trial is not None and self._scale_trial.observe(
                n_common(best, list(chosen))
            ):
                # Forget all outcomes: half of the drafts had the rejected embedding scale.
                self.calibrations, self._outcomes = Calibrations(), []

    def expected_path_probs(self, scorer: DraftScorer) -> Sequence[float]:
        """Returns recent rates at which top-1 chains of 1 to max_draft tokens were all accepted."""
        return self.calibrations.top1(scorer.config).paths(self.max_draft)

    def to_dict(self) -> dict[str, Any]:
        """Returns all calibrations, after learning from all pending outcomes."""
        self._learn_outcomes()
        trial = self._scale_trial
        scale = {} if trial is None or trial.choice is None else {"scale": trial.choice}
        return {**self.calibrations.to_dict(), **scale}

    def learn(self, stored: Mapping[str, Any]) -> None:
        """Restores the calibrations that `to_dict` returned in an earlier process."""
        calibrations = Calibrations.from_dict(stored)
        if self._scale_trial is not None and "scale" in stored:
            self._scale_trial.choose(stored["scale"])
        self.calibrations = calibrations

    def _width(self, request: SpeculativeState) -> int:
        if request.shape == CHAIN and request.scorer.is_argmax:
            request.shape = TOP1
        if request.shape != TOP1:
            return N_RANKED
        return min(1 + len(request.scorer.banned), N_RANKED)

    def _brief(self, request: SpeculativeState, draft: Draft) -> Tree:
        banned, rows = request.scorer.banned, draft.tokens[: request.n_nodes].tolist()
        tokens = [row[0] for row in rows]
        if banned:
            tokens = [next((t for t in row if t not in banned), row[0]) for row in rows]
        request.notes[self.name] = tokens
        probs = self.calibrations.top1(request.scorer.config).log_paths(len(tokens))
        return Tree.chain([request.history[-1], *tokens], [0.0, *probs])

    def _tree(
        self,
        request: SpeculativeState,
        draft: Draft,  # noqa: ARG002
        candidates: PositionCandidates,
    ) -> Tree:
        root, n = request.history[-1], request.n_nodes
        if request.shape == CHAIN:
            return chain(root, candidates, n)
        return best_first_tree(root, candidates, n, main_chain=request.shape == MAIN_CHAIN)

    def _ranked(self, drafts: Sequence[tuple[SpeculativeState, Draft]]) -> list[PositionCandidates]:
        """Ranks candidates of several requests with equal sampling settings at once."""
        scorers = [request.scorer for request, _ in drafts]
        scorer, counts = scorers[0], [len(draft.tokens) for _, draft in drafts]
        ends = list(itertools.accumulate(counts, initial=0))
        tokens = _joined([draft.tokens for _, draft in drafts]).astype(np.int64)
        depths = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        noise = None
        if scorer.config.temperature > 0.0:
            starts = np.repeat([len(request.history) for request, _ in drafts], counts)
            noise = noise_of(scorers, counts, starts + depths, tokens)
        calibration = self.calibrations.of(scorer.config)
        logits = _joined([draft.logits for _, draft in drafts]).astype(np.float64)
        if scorer.config.has_penalties:
            weights = calibration.weights(max(counts))
            for (request, draft), a, b in zip(drafts, ends, ends[1:], strict=False):
                own = None if noise is None else noise[a:b]
                logits[a:b] = _adjusted(request, draft, own, weights)
        elif scorer.banned:
            _ban(scorer, tokens, logits)
        log_q = logits - _joined([draft.log_sum_exp for _, draft in drafts])[:, None]
        # log_sum_exp ignores biases and penalties: shift rows so that no log-probability exceeds 0.
        log_q -= np.maximum(log_q.max(axis=1, keepdims=True), 0.0)
        is_cut = None if noise is None else scorer.is_cut(log_q)
        features = Features(log_q, noise, is_cut, depths)
        probs = calibration.log_probs(features)
        if scorer.banned or scorer.config.has_penalties:
            probs[np.isneginf(logits)] = -np.inf
        batch = _Batch(calibration, features, tokens)
        for (request, _), first, n in zip(drafts, ends, counts, strict=False):
            request.notes[self.name] = _Ranked(batch, first, n)
        places = _best_first(probs, only_best=all(x.shape == CHAIN for x, _ in drafts))
        rows = np.arange(len(tokens))[:, None]
        tokens, probs = tokens[rows, places], probs[rows, places]
        return [PositionCandidates(tokens[a:b], probs[a:b]) for a, b in itertools.pairwise(ends)]

    def _learn_outcomes(self) -> None:
        outcomes, self._outcomes = self._outcomes, []
        by_batch = defaultdict[_Batch, list[tuple[int, Sequence[int]]]](list)
        for note, taken in outcomes:
            by_batch[note.batch].append((note.first, taken))
        for batch, of_batch in by_batch.items():
            batch.observe(of_batch)


def _ranking_class(scorer: DraftScorer) -> object:
    """Returns the sampling settings that requests must share to be ranked in one numpy call."""
    config = scorer.config
    cuts = config.top_k, config.top_p, config.min_p
    return config.temperature, config.has_penalties, cuts, scorer.banned


def _finite(
    drafts: Sequence[tuple[SpeculativeState, Draft]],
) -> Sequence[tuple[SpeculativeState, Draft]]:
    finite = [x for x in drafts if math.isfinite(sum(x[1].log_sum_exp.tolist()))]
    if len(finite) < len(drafts):
        sentence = "the drafter's scores are not finite numbers: decoding goes on without it"
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    return finite


def _joined(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _best_first(probs: NDArray[np.float64], *, only_best: bool) -> NDArray[np.intp]:
    places: NDArray[np.intp] = (
        probs.argmax(axis=1)[:, None] if only_best else np.argsort(-probs, axis=1, kind="stable")
    )
    return places


def _ban(scorer: DraftScorer, tokens: NDArray[np.int64], logits: NDArray[np.float64]) -> None:
    """Sets banned tokens' logits to -inf, unless all candidates of a position are banned."""
    banned = scorer.is_banned(tokens)
    banned &= ~banned.all(axis=1, keepdims=True)
    logits[banned] = -np.inf


def _adjusted(
    request: SpeculativeState,
    draft: Draft,
    noise: NDArray[np.float64] | None,
    weights: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Applies bans and penalties to draft logits; penalties count tokens of the best path too."""
    scorer, path = request.scorer, list(request.history)
    rows = np.empty(draft.logits.shape)
    for depth, (ids, row) in enumerate(zip(draft.tokens, draft.logits, strict=True)):
        rows[depth] = scorer.adjusted_among(ids, row, path)
        if np.isneginf(rows[depth]).all():
            rows[depth] = row
        scores = weights[depth, 0] * rows[depth]
        if noise is not None:
            scores += weights[depth, 2] * noise[depth]
        path.append(int(ids[np.argmax(scores)]))
    return rows
