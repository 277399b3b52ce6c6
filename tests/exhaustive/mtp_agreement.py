"""Compares the drafts of an MTP layer on a device with those on the CPU, for two sequences at once.

`mtp_agreement.py --device CUDA0 --backend-module FILE` prints one JSON line with the largest
difference of a candidate's log-probability, of drafts whose paths are equal so far. Drafts are made
with the whole head and with the rows of 256 tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from checkpoints import PRE_OF_KIND, make_target
from gguf_files import convert

from dflash_gguf import native
from dflash_gguf.config import LoadConfig

# Sizes for which the module of tests has kernels.
SIZES: dict[str, Any] = {
    "head_dim": 256,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 12,
}
N_ROUNDS, N_BEST = 4, 8
SHORTLISTS = None, 256
"""Values of draft_vocab that are compared."""


def drafts(path: Path, **place: Any) -> Iterator[native.Draft]:
    """Yields the drafts of rounds that accept 1 to 3 tokens of known texts."""
    config = LoadConfig(n_ctx=512, n_ubatch=16, n_threads=1, n_parallel=2, **place)
    model = native.Model(str(path), config)
    engine = native.Engine(model, drafter=native.Drafter(str(path), model))
    engine.reserve_verify(32)
    sequences = [native.Sequence(engine) for _ in range(2)]
    texts = np.random.default_rng(3).integers(0, 380, (2, 120)).tolist()
    for i, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
        sequence.prefill(text[: 20 + 9 * i])
    for number in range(N_ROUNDS):
        pairs = list(zip(sequences, texts, strict=True))
        lengths = [1 + number % 3, 4 - number]
        yield from engine.draft(
            [
                native.DraftRequest(sequence, text[sequence.position], n)
                for (sequence, text), n in zip(pairs, lengths, strict=True)
            ],
            N_BEST,
        )
        verified = [[*text[sequence.position :][:2], 5] for sequence, text in pairs]
        engine.run(
            [
                native.BatchEntry(sequence, tokens, is_verify=True)
                for sequence, tokens in zip(sequences, verified, strict=True)
            ]
        )
        engine.commit([(sequence, 1 + number % 2) for sequence in sequences])


def compare(path: Path, device: str, module: str) -> dict[str, Any]:
    errors, n_apart = [], 0
    on_device, on_cpu = (
        itertools.chain.from_iterable(drafts(path, draft_vocab=n, **place) for n in SHORTLISTS)
        for place in ({"device": device, "backend_module": module}, {"n_gpu_layers": 0})
    )
    for expected, found in zip(on_cpu, on_device, strict=True):
        for row, log_sum in enumerate(expected.log_sum_exp):
            best = dict(zip(found.tokens[row].tolist(), found.logits[row].tolist(), strict=True))
            pairs = zip(expected.tokens[row].tolist(), expected.logits[row].tolist(), strict=True)
            errors += [
                abs((logit - log_sum) - (best[token] - found.log_sum_exp[row]))
                for token, logit in pairs
                if token in best
            ]
            if expected.tokens[row, 0] != found.tokens[row, 0]:
                n_apart += 1
                break
    return {"n": len(errors), "largest": float(max(errors)), "n_apart": n_apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--device", "--backend-module", "--only"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "target.gguf"
        directory = make_target(Path(folder) / "target", args.only, seed=7, mtp=True, **SIZES)
        convert(directory, path, "q8_0", PRE_OF_KIND[args.only])
        print(json.dumps(compare(path, args.device, args.backend_module)))


if __name__ == "__main__":
    main()
