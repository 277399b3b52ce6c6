"""The curve of a sweep as an image: tokens a second and tokens a round against candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def require() -> None:
    """ValueError if matplotlib is not there to plot with."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'dflash-gguf[bench]'") from None


def draw(entries: Sequence[dict[str, Any]], path: str) -> None:
    """Writes a PNG: one pair of panels a pair of files.

    Errors: OSError.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pairs = list(dict.fromkeys(entry["pair"] for entry in entries))
    figure, axes = pyplot.subplots(
        len(pairs), 2, figsize=(11, 4 * len(pairs)), squeeze=False, layout="constrained"
    )
    for (left, right), pair in zip(axes, pairs, strict=True):
        mine = [entry for entry in entries if entry["pair"] == pair]
        for axis, name, label in (
            (left, "tokens_per_s", "tokens/s"),
            (right, "tau", "tokens a round"),
        ):
            for kind, mark in (("chain", "o-"), ("tree", "s-")):
                points = sorted(
                    (int(entry["setting"].split()[1]), entry[name])
                    for entry in mine
                    if entry["setting"].startswith(f"{kind} ")
                )
                axis.plot(*zip(*points, strict=True) if points else ([], []), mark, label=kind)
            for kind, style in (("none", ":"), ("auto", "--")):
                for entry in mine:
                    if entry["setting"] == kind:
                        axis.axhline(entry[name], ls=style, color="black", label=kind)
            axis.set(xlabel="candidates a round", ylabel=label, title=pair, xscale="log")
            axis.set_ylim(bottom=0)
            axis.legend()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)
