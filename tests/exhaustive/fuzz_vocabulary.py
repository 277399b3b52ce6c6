"""Child of test_vocabulary.py: loads damaged vocabularies, and uses the valid ones.

Arguments: folder, first seed, count. Prints each seed before its run, then "accepted N". Only
ValueError may be raised.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from dflash_gguf.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from vocabularies import byte_level, gemma, sentence_piece, write

TEXTS = ("", "hello world", " \n\n\t 12345", "<|im_end|>hell<|im_", "né€😀\x00\x7f", "a" * 5000)


def damage_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))[
                : len(data) - at
            ]
        elif kind == 2:
            del data[at : at + rng.randrange(1, 20)]
        else:
            other = rng.randrange(len(data))
            data[at:at] = data[other : other + rng.randrange(1, 20)]
    path.write_bytes(bytes(data))


def damage_values(values: dict[str, Any], rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 4))):
        key = rng.choice(list(values))
        value = values[key]
        if isinstance(value, list) and len(value) > 2:
            at, other = rng.randrange(len(value)), rng.randrange(len(value))
            kind = rng.randrange(5)
            if kind == 0:
                value[at] = value[other]
            elif kind == 1:
                del value[at]
            elif kind == 2:
                value[at], value[other] = value[other], value[at]
            elif kind == 3 and isinstance(value[at], str):
                value[at] = rng.choice(("", " ", "a", " a", "a ", "\n", "<0xZZ>", "</s>", "▁", "é"))
            elif isinstance(value[at], int):
                value[at] = rng.randrange(-1, 8)
        elif isinstance(value, bool):
            values[key] = not value
        elif isinstance(value, int):
            values[key] = rng.choice((0, 1, 255, 262, 263, 2**31 - 1, 2**32 - 1))
        elif rng.randrange(3) == 0:
            del values[key]
        else:
            values[key] = rng.choice(("llama", "gpt2", "gemma4", "llama-bpe", "gpt-4o", "kimi-k2"))


def use(tokenizer: Tokenizer) -> None:
    for special in (False, True):
        tokenizer.detokenize(range(tokenizer.n_tokens), special=special)
        for text in TEXTS:
            for add in (False, True):
                tokenizer.tokenize(text, add_special=add, parse_special=special)


def main(folder: Path, first: int, count: int) -> None:
    n_accepted = 0
    for seed in range(first, first + count):
        print(seed, flush=True)
        rng = random.Random(seed)
        values = rng.choice((byte_level, byte_level, sentence_piece, gemma))()
        if rng.randrange(3):
            damage_values(values, rng)
        path = write(folder / f"{first}.gguf", values)
        if rng.randrange(3) == 0:
            damage_bytes(path, rng)
        try:
            tokenizer = Tokenizer.from_file(path)
        except ValueError:
            continue
        if tokenizer is not None:
            n_accepted += 1
            use(tokenizer)
            tokenizer.close()
    print("accepted", n_accepted)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
