"""Measures the device: name, memory, memory that the driver takes, and copy bandwidth."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from turns import facts

from gpu.ggml_device import copied_gb_per_s
from gpu.setting import Figures, Setting

QUERY = ("name", "driver_version", "memory.used", "memory.total", "clocks.sm", "clocks.mem")


def nvidia(device: str) -> dict[str, str]:
    """Returns what nvidia-smi reports about a CUDA device, or {} if it reports nothing."""
    found = re.fullmatch(r"CUDA(\d+)", device, re.IGNORECASE)
    if found is None:
        return {}
    command = ["nvidia-smi", "-i", found[1], f"--query-gpu={','.join(QUERY)}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


def used_bytes(device: str) -> int | None:
    """Returns the bytes of a CUDA device that all processes use, or None if unknown."""
    text = nvidia(device).get("memory.used", "")
    return int(text) << 20 if text.isdigit() else None


def measure(setting: Setting) -> Iterator[Figures]:
    """Yields a line about the device. context_bytes: GPU memory that the driver takes at start."""
    before = used_bytes(setting.device or "CUDA0")
    device = setting.found_device()
    after = used_bytes(device.name)
    known = before is not None and after is not None
    bandwidth = copied_gb_per_s(device.name, setting.sizes.copied_bytes)
    yield {
        "device": device.name,
        "description": device.description,
        "total_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "context_bytes": after - before if known else None,
        "copied_gb_per_s": round(bandwidth, 1),
        "nvidia_smi": nvidia(device.name),
        **facts(),
    }
