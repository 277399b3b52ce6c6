"""Where the tests of models run: on the CPU, or on the device that DFLASH_TEST_DEVICE names.

GGML_BACKEND_PATH=$(dflash-backend build vulkan) GGML_VK_VISIBLE_DEVICES=0 \
        DFLASH_TEST_DEVICE=Vulkan0 pytest tests/model/test_arch.py tests/model/test_lossless.py ...
"""

from __future__ import annotations

import os
from typing import Any

DEVICE = os.environ.get("DFLASH_TEST_DEVICE")


def placement() -> dict[str, Any]:
    """Fields of LoadConfig: all layers on the device, else on the CPU whatever the machine has."""
    return {"device": DEVICE} if DEVICE else {"n_gpu_layers": 0}
