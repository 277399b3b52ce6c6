"""Runs one PTX instruction on arrays of the software GPU, and compares it with a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from soft_gpu import PtxModule

N = 256
DTYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{kind.replace('s', 'i')}{bits // 8}")
        for kind in "us"
        for bits in (8, 16, 32, 64)
    },
    **{f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (16, 32, 64)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")},
    **{"bf16": np.dtype("u2"), "f16x2": np.dtype("u4"), "bf16x2": np.dtype("u4")},
    "pred": np.dtype("?"),
}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
Model = Callable[..., Any]


def kernel(instruction: str, result: str, operands: list[str]) -> str:
    """A kernel that applies an instruction on %a, %b, ... to the elements of arrays."""
    names = "abce"[: len(operands)]
    lines = [".reg .pred %flag; .reg .b32 %i; .reg .b64 %at, %offset; .reg .b16 %byte;"]
    for name, kind in zip("d" + names, [result, *operands], strict=True):
        lines.append(f".reg .{'pred' if kind == 'pred' else f'b{8 * max(size(kind), 2)}'} %{name};")
    lines.append("mov.u32 %i, %tid.x;")
    for name, kind in zip(names, operands, strict=True):
        lines.append(address(name, kind))
        if kind == "pred":
            lines.append(f"ld.global.u8 %byte, [%at]; setp.ne.u16 %{name}, %byte, 0;")
        else:
            lines.append(f"ld.global.{loaded(kind)} %{name}, [%at];")
    lines.append(instruction)
    lines.append(address("result", result))
    if result == "pred":
        lines.append("selp.b16 %byte, 1, 0, %d; st.global.u8 [%at], %byte;")
    else:
        lines.append(f"st.global.b{8 * size(result)} [%at], %d;")
    parameters = ", ".join(f".param .u64 {name}" for name in ["result", *names])
    return f".visible .entry k({parameters})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def size(kind: str) -> int:
    return DTYPES[kind].itemsize


def loaded(kind: str) -> str:
    return kind if kind in ("u8", "s8") else f"b{8 * size(kind)}"


def address(parameter: str, kind: str) -> str:
    return (
        f"ld.param.u64 %at, [{parameter}]; mul.wide.u32 %offset, %i, {size(kind)};"
        " add.s64 %at, %at, %offset;"
    )


def run(instruction: str, result: str, operands: list[str], arrays: list[np.ndarray]) -> np.ndarray:
    found = np.zeros(N, DTYPES[result])
    PtxModule(kernel(instruction, result, operands)).launch("k", found, *arrays, block=(N,))
    return found


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def random(kind: str, rng: np.random.Generator) -> np.ndarray:
    """Random values, some of them extreme ones."""
    if kind == "pred":
        return rng.random(N) < 0.5
    if kind == "f16x2":
        return np.stack([random("f16", rng), random("f16", rng)], 1).reshape(-1).view(np.uint32)
    if kind == "bf16x2":
        return np.stack([random("bf16", rng), random("bf16", rng)], 1).reshape(-1).view(np.uint32)
    if kind == "bf16":
        return to_bf16(random("f32", rng))
    dtype = DTYPES[kind]
    if dtype.kind == "f":
        values = (rng.standard_normal(N) * 2.0 ** rng.integers(-6, 6, N)).astype(dtype)
        extremes = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5, 2.5, -1.5], dtype)
    else:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, N, dtype, endpoint=True)
        small = rng.integers(max(limits.min, -9), 9, N).astype(dtype)
        values = np.where(rng.random(N) < 0.3, small, values)
        extremes = np.array([0, 1, limits.min, limits.max, limits.max - 1], dtype)
    places = rng.permutation(N)[: 4 * len(extremes)]
    values[places] = np.tile(extremes, 4)[: len(places)]
    return values


def check(
    instruction: str,
    result: str,
    operands: list[str],
    model: Model,
    *,
    tolerance: float = 0,
    arrays: list[np.ndarray] | None = None,
) -> None:
    """Compares an instruction with a model of arrays; NaNs are equal to each other."""
    rng = np.random.default_rng(len(instruction))
    given = [random(kind, rng) for kind in operands] if arrays is None else arrays
    found = run(instruction, result, operands, given)
    with np.errstate(all="ignore"):
        expected = np.asarray(model(*given))
    for one, other in zip(floats(found, result), floats(expected, result), strict=True):
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=0)
            zeros = (one == 0) & (other == 0)
            assert np.array_equal(np.signbit(one[zeros]), np.signbit(other[zeros]))
        else:
            np.testing.assert_array_equal(one, other)


def floats(values: np.ndarray, kind: str) -> list[np.ndarray]:
    if kind == "bf16x2":
        halves = np.ascontiguousarray(values, np.uint32).view(np.uint16)
        return [from_bf16(halves)]
    if kind == "f16x2":
        return [np.ascontiguousarray(values, np.uint32).view(np.float16)]
    return [from_bf16(values)] if kind == "bf16" else [values.astype(DTYPES[kind])]


def by_element(model: Model, result: str) -> Model:
    """An array model from one of Python's unbounded integers, whose result wraps."""
    bits = 8 * size(result)

    def wrapped(*arrays: np.ndarray) -> np.ndarray:
        rows = zip(*(x.tolist() for x in arrays), strict=True)
        return np.array([int(model(*row)) % 2**bits for row in rows], f"u{bits // 8}").view(
            DTYPES[result]
        )

    return wrapped


def in_float(model: Model, kind: str) -> Model:
    """A model that computes exactly, or nearly so, and rounds once to a type."""

    def halves(values: np.ndarray) -> np.ndarray:
        values = np.ascontiguousarray(values)
        if kind == "f16x2":
            return values.view(np.float16)
        if kind.startswith("bf16"):
            return from_bf16(values.view(np.uint16))
        return values

    def rounded(*arrays: np.ndarray) -> np.ndarray:
        exact = model(*(halves(x).astype(np.longdouble) for x in arrays))
        if kind.startswith("bf16"):
            found = to_bf16(exact.astype(np.float32))
            return found.view(np.uint32) if kind == "bf16x2" else found
        if kind == "f16x2":
            return exact.astype(np.float16).view(np.uint32)
        return exact.astype(DTYPES[kind])

    return rounded


def lesser(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found = np.where((a < b) | ((a == b) & np.signbit(a)), a, b)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, found))


def greater(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return -lesser(-a, -b)
