"""Kernels of the software GPU that work on two arrays, given by their PTX body."""

from __future__ import annotations

import numpy as np
from soft_gpu import PtxModule

HEAD = """
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<40>; .reg .b64 %rd<16>; .reg .f32 %f<16>;
mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [a]; ld.param.u64 %rd3, [b];
mul.wide.u32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4;
add.s64 %rd7, %rd3, %rd4;
"""
"""Thread %r1 of block %r2, number %r4: addresses of its elements of out, a and b in %rd5 to 7."""


def kernel(body: str, before: str = "") -> PtxModule:
    parameters = ".param .u64 out, .param .u64 a, .param .u64 b"
    return PtxModule(f"{before}\n.visible .entry k({parameters})\n{{\n{HEAD}{body}\nret;\n}}\n")


def run(
    body: str,
    a: np.ndarray,
    b: np.ndarray | None = None,
    *,
    before: str = "",
    grid: int = 1,
    cooperative: bool = False,
) -> np.ndarray:
    """Runs a kernel with a thread for each element of a; returns its result, of 32 bits each."""
    out = np.zeros(len(a), a.dtype if a.itemsize == 4 else np.uint32)
    other = a if b is None else b
    kernel(body, before).launch(
        "k", out, a, other, grid=(grid,), block=(len(a) // grid,), cooperative=cooperative
    )
    return out


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32)


LOADED = "ld.global.u32 %r5, [%rd6]; ld.global.u32 %r6, [%rd7];"
STORED = "st.global.u32 [%rd5], %r7;"
