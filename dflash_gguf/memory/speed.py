"""Predicted speed of a model whose weights are on a GPU and the CPU.

A round takes the time of reading each weight once where it is, and a wait for each change of the
device. Of the experts of a layer it reads those that some row of the round uses; rows are taken to
choose experts independently. Ignored: the K/V cache, arithmetic on a GPU, overlap. docs/memory.md
has the sources.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..native import Drafter, Model

GPU_BYTES_PER_S = 400e9
CPU_BYTES_PER_S = 50e9
CPU_ROWS = 4
"""Rows that a CPU multiplies in the time of reading the weights; more rows take longer."""
WAIT_S = 50e-6
ACCEPTANCE = 0.89
"""Probability that a drafted token is accepted if the tokens before it are."""
DRAFT_LENGTHS = (0, 3, 7, 15)
"""Lengths of drafts of which the fastest counts, as `auto` would find it; 0: a plain step."""


def tokens_per_s(model: Model, drafters: Sequence[Drafter]) -> float | None:
    """Predicts tokens/s of one answer with the fastest drafter and length; None without a GPU."""
    if not model.on_gpu:
        return None
    speeds = [1 / _target_s(model, 1)]
    for drafter in drafters:
        drafter_on_cpu = drafter.cpu_split_bytes + drafter.mapped_bytes
        drafter_on_gpu = drafter.copied_bytes - drafter.cpu_split_bytes
        for rows in (n + 1 for n in DRAFT_LENGTHS if 0 < n < drafter.block_size):
            # A drafter on the CPU still waits for the GPU, which has the target's head.
            n_passes = rows - 1 if drafter.kind == "mtp" else 1
            draft_s = n_passes * (
                _read_s(drafter_on_gpu, drafter_on_cpu, rows if n_passes == 1 else 1)
                + _wait_s(drafter_on_cpu > 0)
            )
            n_tokens = (1 - ACCEPTANCE**rows) / (1 - ACCEPTANCE)
            speeds.append(n_tokens / (_target_s(model, rows) + draft_s))
    return max(speeds)


def rounded(speed: float) -> str:
    """Returns a predicted speed in three digits, like "68.3" or "14,700"."""
    return f"{float(f'{speed:.3g}'):,g}"


def _target_s(model: Model, rows: int) -> float:
    """Returns the seconds of a pass of the target over some rows."""
    on_cpu = model.cpu_split_bytes + model.mapped_bytes
    experts_on_gpu = model.expert_bytes - model.cpu_expert_bytes
    dense_on_cpu = on_cpu - model.cpu_expert_bytes
    seconds = _read_s(model.device_bytes - experts_on_gpu, dense_on_cpu, rows)
    if model.n_expert:
        active = model.n_expert_used / model.n_expert
        seconds += _read_s(experts_on_gpu, model.cpu_expert_bytes, rows, active)
    # Each layer on the GPU with experts on the CPU waits twice: for the rows to go and to return.
    n_alone = min(model.config.n_cpu_moe, model.n_layer) if model.n_expert else 0
    return seconds + _wait_s(on_cpu > 0) + WAIT_S * 2 * n_alone


def _read_s(gpu_bytes: int, cpu_bytes: int, rows: int, active: float = 1.0) -> float:
    """Returns the seconds of reading these weights for some rows.

    active: share of the weights that one row uses.
    """
    read = 1 - (1 - active) ** rows
    cpu_s = cpu_bytes / CPU_BYTES_PER_S * max(read, active * rows / CPU_ROWS)
    return gpu_bytes / GPU_BYTES_PER_S * read + cpu_s


def _wait_s(is_split: bool) -> float:
    """Returns the seconds of waiting for the GPU, and for the CPU if it has weights too."""
    return WAIT_S * (1 + is_split)
