"""Draws the progress of a training."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .._files import replacing
from .fit import History


def draw(history: History, path: Path) -> None:
    """Writes a PNG with loss, tau and accuracy by block position over the steps."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    loss, tau, places = figure.subplots(1, 3)
    steps = [row[0] for row in history.losses]
    loss.plot(steps, [row[1] for row in history.losses])
    loss.set(title="loss", xlabel="step")
    tau.plot([row[0] for row in history.taus], [row[1] for row in history.taus], marker=".")
    tau.set(title="tau, held out", xlabel="step")
    n_places = len(history.losses[-1]) - 2 if history.losses else 0
    for place in sorted({0, 1, 2, 3, 6, n_places - 1}):
        if 0 <= place < n_places:
            values = [row[2 + place] for row in history.losses]
            places.plot(steps, values, label=f"token {place + 1}")
    places.set(title="accuracy in training", xlabel="step", ylim=(0, 1))
    if n_places:
        places.legend()
    with replacing(path) as file:
        figure.savefig(file, format="png")
