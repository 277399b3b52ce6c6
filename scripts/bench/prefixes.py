"""Measures cached prefixes: reuse instead of computation, a chat's turns, and prefix files.

    python scripts/bench/prefixes.py MODEL [-md DRAFTER] [--tokens 8192] [--turns 10]

Prompts are random tokens. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from turns import facts

import dflash_gguf

ASKED, ANSWERED = 60, 20
"""Tokens of the user's message and of the answer in each turn of the chat."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("-md", "--drafter")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    options = {"n_ctx": args.tokens + 256, "n_threads": args.threads, "cache_ram": 4096}
    with dflash_gguf.load(args.model, drafter=args.drafter, **options) as decoder:
        rng = np.random.default_rng(1)
        tokens = rng.integers(300, decoder.model.n_vocab - 300, args.tokens).tolist()
        found = found_prefix(decoder, tokens) | files(decoder, tokens)
        decoder.reset()
        found["turns"] = turns(decoder, args.turns, rng)
    print(json.dumps({**facts(), "model": os.path.basename(args.model), **found}))


def found_prefix(decoder: dflash_gguf.Decoder, tokens: list[int]) -> dict[str, float]:
    """Returns seconds to the first token, prompt computed or cached, and seconds of a pass."""
    settings: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True, "draft": "none"}
    computed = decoder.generate(tokens, **settings)
    hits = [decoder.generate(tokens, **settings) for _ in range(5)]
    assert all(hit.n_cached == len(tokens) - 1 for hit in hits)
    hit = min(hit.prefill_s for hit in hits)
    step = min(hit.decode_s for hit in hits)
    share = 100 * (hit - step) / computed.prefill_s
    print(
        f"{len(tokens)} tokens: {computed.prefill_s:.2f} s computed, {1e3 * hit:.1f} ms cached; of "
        f"the latter {1e3 * step:.1f} ms are one token's pass, the rest {share:.2f} % of computing"
    )
    return {"computed_s": computed.prefill_s, "found_s": hit, "step_s": step}


def files(decoder: dflash_gguf.Decoder, tokens: list[int]) -> dict[str, float]:
    """Returns MB/s of saving and loading a prefix, and of writing and reading its bytes alone."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path, plain = Path(folder) / "p.dfl", Path(folder) / "plain"
        seconds = {"save": 1e9, "write": 1e9, "load": 1e9, "read": 1e9}

        def timed(name: str, work: Any) -> None:
            began = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - began)

        for _ in range(3):
            timed("save", lambda: decoder.save_prefix(path, tokens[:-1]))
            data = path.read_bytes()
            timed("write", lambda data=data: write(plain, data))
            decoder.reset()
            timed("load", lambda: decoder.load_prefix(path))
            timed("read", plain.read_bytes)
    rates = {f"{name}_mb_per_s": len(data) / 1e6 / s for name, s in seconds.items()}
    print(", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    return rates


def write(path: Path, data: bytes) -> None:
    """Writes a file and flushes it to disk, as saving a prefix does."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def turns(decoder: dflash_gguf.Decoder, n: int, rng: np.random.Generator) -> list[dict[str, float]]:
    """Runs a chat; returns each turn's computed prompt tokens and seconds to the first token."""
    text: list[int] = []
    found = []
    for turn in range(n):
        text += rng.integers(300, decoder.model.n_vocab - 300, ASKED).tolist()
        result = decoder.generate(text, max_tokens=ANSWERED, ignore_eos=True)
        text += result.tokens
        found.append({"n_prefilled": result.n_prefilled, "prefill_s": result.prefill_s})
        print(
            f"turn {turn + 1}: {result.n_prompt} tokens, {result.n_prefilled} computed, first "
            f"token after {1e3 * result.prefill_s:.0f} ms"
        )
    return found


if __name__ == "__main__":
    main()
