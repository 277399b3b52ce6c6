"""Placement of models in tests: on the CPU, or on the device named by DFLASH_TEST_DEVICE.

GGML_BACKEND_PATH=$(dflash-backend build vulkan) GGML_VK_VISIBLE_DEVICES=0 \
        DFLASH_TEST_DEVICE=Vulkan0 pytest tests/model/test_arch.py tests/model/test_lossless.py ...
"""

from __future__ import annotations

import os
from typing import Any

DEVICE = os.environ.get("DFLASH_TEST_DEVICE")


def placement() -> dict[str, Any]:
    """Returns fields of LoadConfig that put all layers on the device or the CPU."""
    return {"device": DEVICE} if DEVICE else {"n_gpu_layers": 0}
