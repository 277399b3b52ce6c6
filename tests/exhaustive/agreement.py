"""Compares a device with the CPU on small random models of every architecture.

`agreement.py --device Vulkan0 --backend-module FILE` prints one JSON line per architecture;
scripts/bench_gpu.py runs it as part `correct`. Errors are the largest difference of any logit,
divided by the range of the CPU's logits.

Results need not be equal: tensor cores of NVIDIA GPUs keep 10 bits of each float32 factor, and have
no attention over float32 cells. But each tree node must be nearer to a serial run of its own path
than to that of a cousin: the same token at the same depth after other ancestors. Cousins whose
serial runs differ by less than the device's own error are not compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_gguf import native
from dflash_gguf.config import DecodeConfig, LoadConfig
from dflash_gguf.decoder import Decoder

sys.path += [
    str(Path(__file__).resolve().parents[2] / x)
    for x in ("tests/support", "scripts", "scripts/bench")
]
from gate import margins_at_differences
from gpu.child import report
from gpu.files import write_pair
from gpu.setting import Figures, Setting, add_arguments
from half_right import HalfRight
from synthetic_shapes import TINY_NAMES
from trees import bushy, comb, cousins, deep, path_to, scattered, serial_logits, tokens_for

N_CTX = 512
N_PROMPT = 100
N_UBATCH = 64
N_ANSWER = 40
N_THREADS = 2  # CPU threads; more would wait for each other
CACHE_TYPES = ("f32", "f16")
"""Types of K and V, in order of preference; the first that the device supports is used."""
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
}

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pair:
    target: Path
    drafter: Path

    def open(self, config: LoadConfig) -> native.Sequence:
        model = native.Model(str(self.target), config)
        return native.Sequence(
            native.Engine(model, drafter=native.Drafter(str(self.drafter), model))
        )


def compare(
    setting: Setting,
    names: Sequence[str] = TINY_NAMES,
    weights: str = "f32",
    cache_type: str | None = None,
    *,
    is_short: bool = False,
) -> Iterator[Figures]:
    """Yields a line for each model.

    cache_type: K's and V's on both devices, or None to choose. is_short: True for a chain and one
    tree of 16 nodes, and greedy answers of half the length.
    """
    setting.found_device()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            seed = 2 * TINY_NAMES.index(name) + 1
            pair = Pair(*write_pair(Path(folder), name, weights, seed=seed))
            figures: Figures = {"architecture": name.removeprefix("tiny-")}
            try:
                figures |= _compare(pair, setting, cache_type, is_short)
            except native.Error as error:
                figures["error"] = str(error)
            yield figures
            for path in (pair.target, pair.drafter):
                path.unlink()


def _compare(pair: Pair, setting: Setting, cache_type: str | None, is_short: bool) -> Figures:
    on_cpu = sizes_of(cache_type or CACHE_TYPES[0])
    cpu = pair.open(LoadConfig(n_gpu_layers=0, n_threads=N_THREADS, **on_cpu))
    device, type_name = _on_device(pair, setting, [cache_type] if cache_type else CACHE_TYPES)
    serial = native.Sequence(native.Engine(device.engine.model))
    tokens = np.random.default_rng(3).integers(0, cpu.engine.model.n_vocab, N_PROMPT).tolist()
    figures: Figures = {"cache_type": type_name}
    expected = cpu.logits(tokens)
    scale = float(np.ptp(expected))
    figures["prompt"] = _off(device.logits(tokens), expected, scale)
    serial.prefill(tokens)
    random = np.random.default_rng(4)
    shapes = [deep(16), bushy(16)]
    if not is_short:
        shapes += [comb(16), scattered(23, random), scattered(64, random)]
    figures |= _trees(cpu, device, serial, scale, shapes)
    figures |= _drafts(cpu, device)
    tail = tokens[:12]
    expected = cpu.logits(tail)
    figures["after_trees"] = _off(device.logits(tail), expected, scale)
    serial.reset()
    device.reset()
    return figures | _law(device, is_short)


def sizes_of(type_name: str) -> dict[str, Any]:
    """Returns the fields of a LoadConfig for K and V of a type."""
    cache = {"cache_type_k": type_name, "cache_type_v": type_name}
    return {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, **cache}


def _on_device(pair: Pair, setting: Setting, types: Sequence[str]) -> tuple[native.Sequence, str]:
    for type_name in types[:-1]:
        try:
            return pair.open(setting.load_config(**sizes_of(type_name))), type_name
        except native.Error:
            continue
    return pair.open(setting.load_config(**sizes_of(types[-1]))), types[-1]


def _off(found: Rows, expected: Rows, scale: float) -> float:
    return float(np.abs(found - expected).max() / scale)


def _trees(
    cpu: native.Sequence,
    device: native.Sequence,
    serial: native.Sequence,
    scale: float,
    shapes: Sequence[list[int]],
) -> Figures:
    """Compares trees, the first a chain, in turn; a path of each extends the common timeline."""
    random = np.random.default_rng(5)
    device.engine.reserve_verify(64)
    of_chain, of_tree, of_serial = 0.0, 0.0, 0.0
    distances: list[tuple[float, float, float]] = []
    each: list[float] = []
    for parents in shapes:
        tokens = tokens_for(parents, random, cpu.engine.model.n_vocab)
        start = serial.snapshot(), cpu.snapshot()
        alone = serial_logits(serial, start[0], tokens, parents)
        expected = serial_logits(cpu, start[1], tokens, parents)
        rows = device.verify_tree(tokens, parents)
        found = np.stack([rows.logits(i) for i in range(len(tokens))])
        of_serial = max(of_serial, _off(alone, expected, scale))
        each += (np.abs(found - expected).max(axis=1) / scale).tolist()
        if parents == shapes[0]:
            of_chain = _off(found, expected, scale)
        else:
            of_tree = max(of_tree, _off(found, expected, scale))
        for a, b in cousins(tokens, parents):
            ends = (found[a], alone[a]), (found[a], alone[b]), (alone[a], alone[b])
            own, other, apart = (_off(x, y, scale) for x, y in ends)
            distances.append((own, other, apart))
        path = path_to(parents, len(parents) - 1)
        device.commit_path(path)
        for sequence, prefix in zip((serial, cpu), start, strict=True):
            sequence.attach(prefix, prefix.n_tokens)
            sequence.prefill([tokens[x] for x in path])
    # Either serial run may be off by the device's own error.
    compared = [(own, other) for own, other, apart in distances if apart > 2 * of_serial]
    return {
        "serial": of_serial,
        "chain": of_chain,
        "tree": of_tree,
        "median_node": float(np.median(each)),
        "cousins": len(distances),
        "compared_cousins": len(compared),
        "mistaken_cousins": sum(own >= other for own, other in compared),
        "worst_own_over_cousin": max((own / other for own, other in compared), default=0.0),
    }


def _drafts(cpu: native.Sequence, device: native.Sequence) -> Figures:
    """Compares the candidates and logits of a draft after the same timeline."""
    n = cpu.max_draft
    expected, found = cpu.draft(7, n, 8), device.draft(7, n, 8)
    same = [len(set(a) & set(b)) for a, b in zip(expected.tokens, found.tokens, strict=True)]
    scale = float(np.ptp(expected.logits))
    return {
        "drafter_best": float(np.abs(found.logits[:, 0] - expected.logits[:, 0]).max() / scale),
        "drafter_log_sum_exp": float(np.abs(found.log_sum_exp - expected.log_sum_exp).max()),
        "drafter_same_of_8": float(np.mean(same)),
    }


def _law(device: native.Sequence, is_short: bool) -> Figures:
    """Returns the plain token's lead, in logits, at every difference of a drafted answer."""
    figures: Figures = {}
    prompt = np.random.default_rng(8).integers(0, device.engine.model.n_vocab, 30).tolist()
    decoder = Decoder(device, None)
    n_answer = N_ANSWER // 2 if is_short else N_ANSWER
    for name, way in list(WAYS.items())[: 1 if is_short else None]:
        config = DecodeConfig(max_tokens=n_answer, draft="none", **way)
        plain = decoder.generate(prompt, config).tokens
        # The prefix cache has the tokens that this prompt begins with.
        longer, rest = [*prompt, *plain[: n_answer // 2]], plain[n_answer // 2 :]
        continued = decoder.generate(longer, replace(config, max_tokens=len(rest)))
        n_same = sum(a == b for a, b in zip(continued.tokens, rest, strict=True))
        figures[f"{name}_continued"] = {"n_cached": continued.n_cached, "n_same": n_same}
        for draft in ("chain", "tree"):
            decoder._speculative.proposers = [
                knowing(plain, len(prompt), device.engine.model.n_vocab, draft)
            ]
            margins, result = margins_at_differences(decoder, prompt, config, plain, draft=draft)
            figures[f"{name}_{draft}"] = {
                "differences": len(margins),
                "margins": [round(margin, 6) for margin in margins],
                "tokens_a_round": round((result.n_tokens - 1) / max(result.rounds, 1), 2),
            }
    return figures


def knowing(plain: Sequence[int], n_prompt: int, n_vocab: int, draft: str) -> HalfRight:
    """Returns a proposer of a plain answer, beside wrong tokens. draft: "chain" or "tree"."""
    width = 3 if draft == "tree" else 1
    return HalfRight(
        plain,
        n_prompt,
        lambda r: 3 + 5 * r % 13,
        width=width,
        rank=lambda i: (i // 3) % width,
        n_vocab=n_vocab,
    )


def main() -> None:
    """Runs the command line and ignores arguments of other parts of bench_gpu.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("--child", default="correct", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=TINY_NAMES, action="append", help="may be given again")
    parser.add_argument("--weights", default="f32", help="type of the weights; default: f32")
    parser.add_argument("--cache-type", help="of K and V; default: the first that the device has")
    parser.add_argument("--short", action="store_true", help="fewer trees and shorter answers")
    args, _ = parser.parse_known_args()
    names = args.only or TINY_NAMES
    lines = compare(Setting.of(args), names, args.weights, args.cache_type, is_short=args.short)
    report(args.child, lines)


if __name__ == "__main__":
    main()
