"""Draws measurements as PNG images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._files import replacing


def require() -> None:
    """Raises ValueError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'dflash-gguf[bench]'") from None


def draw(entries: Sequence[dict[str, Any]], path: str) -> None:
    """Plots tokens per second and per round by number of candidates; a row for each model pair."""
    pairs = list(dict.fromkeys(entry["pair"] for entry in entries))
    figure, axes = _panels(len(pairs), 2, (11, 4 * len(pairs)))
    for (left, right), pair in zip(axes, pairs, strict=True):
        mine = [entry for entry in entries if entry["pair"] == pair]
        for axis, name, label in (
            (left, "tokens_per_s", "tokens/s"),
            (right, "tau", "tokens a round"),
        ):
            scale = "linear"
            for kind, mark in (("chain", "o-"), ("tree", "s-")):
                points = sorted(
                    (int(entry["setting"].split()[1]), entry[name])
                    for entry in mine
                    if entry["setting"].startswith(f"{kind} ")
                )
                if points:
                    scale = "log"
                    axis.plot(*zip(*points, strict=True), mark, label=kind)
            for kind, style in (("none", ":"), ("auto", "--")):
                for entry in mine:
                    if entry["setting"] == kind:
                        axis.axhline(entry[name], ls=style, color="black", label=kind)
            axis.set(xlabel="candidates a round", ylabel=label, title=pair, xscale=scale)
            axis.set_ylim(bottom=0)
            axis.legend()
    _write(figure, path)


def draw_sweep(entries: Sequence[dict[str, Any]], path: str) -> None:
    """Plots tokens per second of each model pair and setting, one panel per prompt file."""
    classes = list(dict.fromkeys(entry["class"] for entry in entries))
    n_rows = len({(entry["pair"], entry["setting"]) for entry in entries})
    size = 3 + 3 * len(classes), 1.5 + 0.4 * n_rows
    figure, axes = _panels(1, len(classes), size, sharey=True)
    for axis, name in zip(axes[0], classes, strict=True):
        mine = [entry for entry in entries if entry["class"] == name]
        names = [f"{entry['pair']}\n{entry['setting']}" for entry in mine]
        axis.barh(names, [entry["tokens_per_s"] for entry in mine])
        axis.set(xlabel="tokens/s", title=name)
    axes[0][0].invert_yaxis()
    _write(figure, path)


def draw_parallel(entries: Sequence[dict[str, Any]], path: str) -> None:
    """Plots tokens per second of all answers together against the number of parallel answers."""
    pairs = list(dict.fromkeys(entry["pair"] for entry in entries))
    figure, axes = _panels(1, len(pairs), (6 * len(pairs), 4))
    for axis, pair in zip(axes[0], pairs, strict=True):
        mine = [entry for entry in entries if entry["pair"] == pair]
        for setting in dict.fromkeys(entry["setting"] for entry in mine):
            points = [(e["n"], e["tokens_per_s"]) for e in mine if e["setting"] == setting]
            axis.plot(*zip(*points, strict=True), "o-", label=setting)
        axis.set(xlabel="answers at once", ylabel="tokens/s of all", title=pair)
        axis.set_ylim(bottom=0)
        axis.legend()
    _write(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _panels(n_rows: int, n_columns: int, size: tuple[float, float], **settings: Any) -> Any:
    settings |= {"figsize": size, "squeeze": False, "layout": "constrained"}
    return _pyplot().subplots(n_rows, n_columns, **settings)


def _write(figure: Any, path: str) -> None:
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format="png")
    _pyplot().close(figure)
