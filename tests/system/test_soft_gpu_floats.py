"""Float instructions of the software GPU and conversions against models, with random operands."""

from __future__ import annotations

import math

import numpy as np
import pytest
from ptx_models import (
    DTYPES,
    INTEGERS,
    Model,
    N,
    by_element,
    check,
    from_bf16,
    greater,
    in_float,
    lesser,
    run,
    size,
    to_bf16,
)


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "f16x2", "bf16", "bf16x2"])
@pytest.mark.parametrize(
    ("name", "n", "model"),
    [
        ("add", 2, np.add),
        ("sub", 2, np.subtract),
        ("mul", 2, np.multiply),
        ("min", 2, lesser),
        ("max", 2, greater),
        ("fma.rn", 3, lambda a, b, c: a * b + c),
        ("neg", 1, np.negative),
        ("abs", 1, np.abs),
    ],
)
def test_floats(name: str, n: int, kind: str, model: Model) -> None:
    # Fused sums of bfloat16 are rounded twice, to float32 first.
    tolerance = 2**-8 if name == "fma.rn" and kind.startswith("bf16") else 0
    check(
        f"{name}.{kind} %d, {', '.join(['%a', '%b', '%c'][:n])};",
        kind,
        [kind] * n,
        in_float(model, kind),
        tolerance=tolerance,
    )


def test_float_functions() -> None:
    for kind in ("f32", "f64"):
        divided = in_float(np.divide, kind)
        check(f"div.rn.{kind} %d, %a, %b;", kind, [kind, kind], divided)
        check(f"sqrt.rn.{kind} %d, %a;", kind, [kind], np.sqrt)
        check(f"rcp.rn.{kind} %d, %a;", kind, [kind], lambda a: 1 / a)
    for name, model in {
        "rsqrt.approx.f32": lambda a: 1 / np.sqrt(a.astype("f8")),
        "ex2.approx.f32": lambda a: np.exp2(a.astype("f8")),
        "lg2.approx.f32": lambda a: np.log2(a.astype("f8")),
        "sin.approx.f32": lambda a: np.sin(a.astype("f8")),
        "cos.approx.f32": lambda a: np.cos(a.astype("f8")),
        "tanh.approx.f32": lambda a: np.tanh(a.astype("f8")),
    }.items():
        check(
            f"{name} %d, %a;",
            "f32",
            ["f32"],
            lambda a, model=model: model(a).astype(np.float32),
            tolerance=1e-6,
        )
    check(
        "add.sat.f32 %d, %a, %b;",
        "f32",
        ["f32", "f32"],
        lambda a, b: np.where((a + b) > 0, np.minimum(a + b, 1), 0).astype(np.float32),
    )
    check(
        "max.NaN.f32 %d, %a, %b;",
        "f32",
        ["f32", "f32"],
        lambda a, b: np.where(np.isnan(a + b) & (np.isnan(a) | np.isnan(b)), np.nan, greater(a, b)),
    )
    check("copysign.f32 %d, %a, %b;", "f32", ["f32", "f32"], lambda a, b: np.copysign(b, a))


def toward_zero(exact: np.ndarray) -> np.ndarray:
    """Float32 numbers that are no farther from zero."""
    rounded = exact.astype(np.float32)
    is_too_far = np.abs(rounded.astype(np.longdouble)) > np.abs(exact)
    return np.where(is_too_far, np.nextafter(rounded, np.float32(0)), rounded)


def test_sums_and_products_rounded_toward_zero() -> None:
    rng = np.random.default_rng(0)
    arrays = [(rng.standard_normal(N) * 2.0 ** rng.integers(-30, 30, N)).astype("f4") for _ in "ab"]
    arrays[0][:2], arrays[1][:2] = np.float32(0.49999997), 0.5  # as roundf() adds
    for name, model in (("add", np.add), ("mul", np.multiply)):
        exact = model(*(x.astype(np.longdouble) for x in arrays))
        expected = toward_zero(exact)
        check(
            f"{name}.rz.f32 %d, %a, %b;",
            "f32",
            ["f32", "f32"],
            lambda *_, expected=expected: expected,
            arrays=arrays,
        )


def test_denormals_are_flushed_where_the_kernel_says_so() -> None:
    small = [np.full(N, 1e-39, np.float32), np.zeros(N, np.float32)]
    for name, expected in (("add.f32", np.float32(1e-39)), ("add.ftz.f32", np.float32(0))):
        found = run(f"{name} %d, %a, %b;", "f32", ["f32", "f32"], small)
        assert (found == expected).all()


def clamped(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounded values in the range of an integer type; NaN gives 0."""
    limits = np.iinfo(DTYPES[kind])
    rows = [
        0
        if math.isnan(x)
        else limits.min
        if x < limits.min
        else limits.max
        if x > limits.max
        else int(x)
        for x in values.astype(float).tolist()
    ]
    return np.array(rows, DTYPES[kind])


ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("to", ["u8", "s8", *INTEGERS])
def test_conversions_to_integers(to: str) -> None:
    held = to if size(to) > 1 else f"{to[0]}16"
    for rounding, model in ROUNDINGS.items():
        for source in ("f16", "f32", "f64"):
            check(
                f"cvt.{rounding}.{to}.{source} %d, %a;",
                held,
                [source],
                lambda a, model=model: clamped(model(a), to).astype(DTYPES[held]),
            )
    for source in ("u8", "s8", *INTEGERS):
        wrap = by_element(
            lambda a: (
                (a + (2 ** (8 * size(to) - 1) if to[0] == "s" else 0)) % 2 ** (8 * size(to))
                - (2 ** (8 * size(to) - 1) if to[0] == "s" else 0)
            ),
            held,
        )
        check(f"cvt.{to}.{source} %d, %a;", held, [source], wrap)
    limits = np.iinfo(DTYPES[to])
    bounded = by_element(lambda a: min(max(a, int(limits.min)), int(limits.max)), held)
    check(f"cvt.sat.{to}.s64 %d, %a;", held, ["s64"], bounded)


def test_conversions_to_floats() -> None:
    for to in ("f16", "f32", "f64"):
        for source in ("u8", "s8", *INTEGERS, "f16", "f32", "f64"):
            check(
                f"cvt.rn.{to}.{source} %d, %a;",
                to,
                [source],
                lambda a, to=to: (
                    a.astype(np.longdouble).astype(DTYPES[to])
                    if to != "f16"
                    else a.astype(np.float32).astype(np.float16)
                ),
            )
    for rounding, model in ROUNDINGS.items():
        check(f"cvt.{rounding}.f32.f32 %d, %a;", "f32", ["f32"], model)
    check(
        "cvt.sat.f32.f32 %d, %a;",
        "f32",
        ["f32"],
        lambda a: np.where(a > 0, np.minimum(a, 1), 0).astype(np.float32),
    )
    check("cvt.rn.bf16.f32 %d, %a;", "bf16", ["f32"], to_bf16)
    check("cvt.f32.bf16 %d, %a;", "f32", ["bf16"], from_bf16)
    check(
        "cvt.rn.f16x2.f32 %d, %a, %b;",
        "f16x2",
        ["f32", "f32"],
        lambda a, b: np.stack([b, a], 1).astype("f2").reshape(-1).view("u4"),
    )
    check(
        "cvt.rn.bf16x2.f32 %d, %a, %b;",
        "bf16x2",
        ["f32", "f32"],
        lambda a, b: to_bf16(np.stack([b, a], 1).reshape(-1)).view("u4"),
    )
    finite = [np.random.default_rng(1).standard_normal(N).astype(np.float32)]
    check(
        "cvt.rna.tf32.f32 %d, %a;",
        "b32",
        ["f32"],
        lambda a: (a.view("u4") + 0x1000) & ~np.uint32(0x1FFF),
        arrays=finite,
    )
