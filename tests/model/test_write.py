"""The converter rounds to BF16 as torch does."""

from __future__ import annotations

import numpy as np
from plans import encoded


def test_bfloat16_rounds_to_even_as_torch_does() -> None:
    import torch

    values = np.random.default_rng(3).standard_normal((4, 999)).astype(np.float32)
    values[0, :4] = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -0.0, 1e-40])
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    np.testing.assert_array_equal(encoded(values, "bf16"), expected)
