"""Compares a device with the CPU on small float32 models of every architecture.

`agreement.py --device Vulkan0 --backend-module FILE` prints one JSON line per architecture;
scripts/bench_gpu.py runs it as part `correct`. Errors are the largest difference of any logit,
divided by the range of the CPU's logits.

Results need not be equal: tensor cores of NVIDIA GPUs keep 10 bits of each float32 factor, and have
no attention over float32 cells. But each tree node must be nearer to a serial run of its own path
than to that of a cousin: the same token at the same depth after other ancestors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from trees import comb, cousins, deep, path_to, scattered, serial_logits, tokens_for

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


def measure(setting: Setting) -> Iterator[Figures]:
    setting.found_device()
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(TINY_NAMES):
            pair = Pair(*write_pair(Path(folder), name, "f32", seed=2 * number + 1))
            figures: Figures = {"architecture": name.removeprefix("tiny-")}
            try:
                figures |= _compare(pair, setting)
            except native.Error as error:
                figures["error"] = str(error)
            yield figures
            for path in (pair.target, pair.drafter):
                path.unlink()


def _compare(pair: Pair, setting: Setting) -> Figures:
    cpu = pair.open(LoadConfig(n_gpu_layers=0, n_threads=N_THREADS, **_sizes("f32")))
    device, type_name = _on_device(pair, setting)
    serial = native.Sequence(native.Engine(device.engine.model))
    tokens = np.random.default_rng(3).integers(0, cpu.engine.model.n_vocab, N_PROMPT).tolist()
    figures: Figures = {"cache_type": type_name}
    expected = cpu.logits(tokens)
    scale = float(np.ptp(expected))
    figures["prompt"] = _off(device.logits(tokens), expected, scale)
    serial.prefill(tokens)
    figures |= _trees(cpu, device, serial, scale)
    figures |= _drafts(cpu, device)
    tail = tokens[:12]
    expected = cpu.logits(tail)
    figures["after_trees"] = _off(device.logits(tail), expected, scale)
    serial.reset()
    device.reset()
    return figures | _law(device)


def _sizes(type_name: str) -> dict[str, Any]:
    cache = {"cache_type_k": type_name, "cache_type_v": type_name}
    return {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, **cache}


def _on_device(pair: Pair, setting: Setting) -> tuple[native.Sequence, str]:
    for type_name in CACHE_TYPES[:-1]:
        try:
            return pair.open(setting.load_config(**_sizes(type_name))), type_name
        except native.Error:
            continue
    return pair.open(setting.load_config(**_sizes(CACHE_TYPES[-1]))), CACHE_TYPES[-1]


def _off(found: Rows, expected: Rows, scale: float) -> float:
    return float(np.abs(found - expected).max() / scale)


def _trees(
    cpu: native.Sequence, device: native.Sequence, serial: native.Sequence, scale: float
) -> Figures:
    """Compares a chain and three trees in turn; a path of each extends the common timeline."""
    random = np.random.default_rng(4)
    device.engine.reserve_verify(64)
    of_chain, of_tree, of_serial, of_cousins, closest = 0.0, 0.0, 0.0, 0.0, np.inf
    n_mistaken = n_cousins = 0
    for parents in (deep(16), comb(16), scattered(23, random), scattered(64, random)):
        tokens = tokens_for(parents, random, cpu.engine.model.n_vocab)
        start = serial.snapshot(), cpu.snapshot()
        alone = serial_logits(serial, start[0], tokens, parents)
        expected = serial_logits(cpu, start[1], tokens, parents)
        rows = device.verify_tree(tokens, parents)
        found = np.stack([rows.logits(i) for i in range(len(tokens))])
        of_serial = max(of_serial, _off(alone, expected, scale))
        if parents == deep(16):
            of_chain = _off(found, expected, scale)
        else:
            of_tree = max(of_tree, _off(found, expected, scale))
        for a, b in cousins(tokens, parents):
            own = _off(found[a], alone[a], scale)
            other = _off(found[a], alone[b], scale)
            n_cousins += 1
            n_mistaken += own >= other
            of_cousins, closest = max(of_cousins, own / other), min(closest, other)
        path = path_to(parents, len(parents) - 1)
        device.commit_path(path)
        for sequence, prefix in zip((serial, cpu), start, strict=True):
            sequence.attach(prefix, prefix.n_tokens)
            sequence.prefill([tokens[x] for x in path])
    return {
        "serial": of_serial,
        "chain": of_chain,
        "tree": of_tree,
        "cousins": n_cousins,
        "mistaken_cousins": n_mistaken,
        "worst_own_over_cousin": of_cousins,
        "closest_cousin": closest,
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


def _law(device: native.Sequence) -> Figures:
    """Returns the plain token's lead, in logits, at every difference of a drafted answer."""
    figures: Figures = {}
    prompt = np.random.default_rng(8).integers(0, device.engine.model.n_vocab, 30).tolist()
    decoder = Decoder(device, None)
    for name, way in WAYS.items():
        config = DecodeConfig(max_tokens=N_ANSWER, draft="none", **way)
        plain = decoder.generate(prompt, config).tokens
        for draft in ("chain", "tree"):
            decoder._speculative.proposers = [
                _knowing(plain, len(prompt), device.engine.model.n_vocab, draft)
            ]
            margins, result = margins_at_differences(decoder, prompt, config, draft=draft)
            figures[f"{name}_{draft}"] = {
                "differences": len(margins),
                "margins": [round(margin, 6) for margin in margins],
                "tokens_a_round": round((result.n_tokens - 1) / max(result.rounds, 1), 2),
            }
    return figures


def _knowing(plain: Sequence[int], n_prompt: int, n_vocab: int, draft: str) -> HalfRight:
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
    args, _ = parser.parse_known_args()
    report(args.child, measure(Setting.of(args)))


if __name__ == "__main__":
    main()
