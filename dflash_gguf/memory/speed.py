"""Predicted speed of a model whose weights are on a GPU and the CPU.

A round takes the time of reading each weight once where it is, and a wait for each change of the
device. Ignored: the K/V cache, arithmetic on a GPU, overlap. docs/memory.md has the sources.
"""

from __future__ import annotations

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


def tokens_per_s(model: Model, drafter: Drafter | None) -> float | None:
    """Predicts tokens/s of one answer with the fastest draft length.

    None without a GPU, and for a mixture of experts, which reads only a part of its weights.
    """
    if not model.on_gpu or model.n_expert:
        return None
    on_cpu = model.cpu_split_bytes + model.mapped_bytes
    speeds = [1 / _pass_s(model.device_bytes, on_cpu, 1)]
    if drafter is not None:
        drafter_on_cpu = drafter.cpu_split_bytes + drafter.mapped_bytes
        drafter_on_gpu = drafter.copied_bytes - drafter.cpu_split_bytes
        for rows in (n + 1 for n in DRAFT_LENGTHS if 0 < n < drafter.block_size):
            verify_s = _pass_s(model.device_bytes, on_cpu, rows)
            # A drafter on the CPU multiplies with the target's head on the GPU.
            draft_s = _pass_s(drafter_on_gpu, drafter_on_cpu, rows)
            n_tokens = (1 - ACCEPTANCE**rows) / (1 - ACCEPTANCE)
            speeds.append(n_tokens / (verify_s + draft_s))
    return max(speeds)


def rounded(speed: float) -> str:
    """Returns a predicted speed in three digits, like "68.3" or "14,700"."""
    return f"{float(f'{speed:.3g}'):,g}"


def _pass_s(gpu_bytes: int, cpu_bytes: int, rows: int) -> float:
    """Returns the seconds of a pass that reads these weights once for some rows."""
    cpu_s = cpu_bytes / CPU_BYTES_PER_S * max(1.0, rows / CPU_ROWS)
    return gpu_bytes / GPU_BYTES_PER_S + cpu_s + WAIT_S * (1 + (cpu_bytes > 0))
