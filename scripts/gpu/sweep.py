"""Measures plain steps, chains and trees of many sizes at published acceptance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpu.ggml_device import copied_gb_per_s
from gpu.setting import Figures, Setting
from gpu.speed import Driver, measure_rounds, most_tokens, open_pair, random_tokens, settings_of


def measure(setting: Setting) -> Iterator[Figures]:
    """Yields one line each for plain rounds, chains and trees of each size."""
    sizes = setting.sizes
    bandwidth = copied_gb_per_s(setting.found_device().name, sizes.copied_bytes)
    n_ctx = sizes.n_prompt + most_tokens(sizes) + max(sizes.budgets) + 1
    sequence = open_pair(setting, n_ctx)
    for kind, size in settings_of(setting, sizes.budgets):
        sequence.reset()
        sequence.prefill(random_tokens(sequence, sizes.n_prompt, seed=1))
        yield measure_rounds(Driver(sequence, kind, size), sizes, bandwidth)


def draw_curve(lines: list[Figures], path: Path, title: str) -> None:
    """Writes a plot of tokens per second and tokens a round over the sizes of drafts."""
    from dflash_gguf.bench.plot import draw

    names = {"plain": "none"}
    entries = [
        {
            "pair": title,
            "setting": names.get(x["kind"], f"{x['kind']} {x['size']}"),
            "tokens_per_s": x["tokens_per_s"],
            "tau": x["tokens_a_round"],
        }
        for x in lines
    ]
    draw(entries, str(path))
