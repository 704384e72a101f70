"""Compile the kernels for a card of the capability that is given, and print the name of each variant."""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.decoding.cuda import gumbel_kernels as kernels

MULTIPLES = ("logits", "stride", "vocabulary", "values", "tokens", "sums")
"""Arguments that are multiples of 16 in common models."""
ROWS = {"logits": "*fp32", "stride": "i32", "vocabulary": "i32"}
NUMBERS = {"noisy": "*i64", "seeds": "*i64", "positions": "*i64"}
CHOICE = {**ROWS, **NUMBERS, "values": "*fp64", "tokens": "*i64"}
PARTS = {"values": "*fp64", "tokens": "*i64", "parts": "i32", "best": "*fp64", "chosen": "*i64"}
SIZES = {"TILE": kernels.TILE, "PART": kernels.PART}
VARIANTS: list[tuple[Any, dict[str, str], dict[str, Any]]] = [
    (kernels._choose_part, CHOICE, {"divisors": None, **SIZES}),
    (kernels._choose_part, {**CHOICE, "logits": "*bf16", "divisors": "*fp64"}, SIZES),
    (kernels._choose_part, CHOICE, {"divisors": None, "stride": 1, "vocabulary": 1, **SIZES}),
    (kernels._choose_among_parts, PARTS, {"PARTS": 16}),
    (kernels._add_noise, {**ROWS, **NUMBERS, "sums": "*fp64"}, {"divisors": None, "TILE": kernels.TILE}),
    (
        kernels._add_noise,
        {**ROWS, **NUMBERS, "divisors": "*fp64", "sums": "*fp64"},
        {"TILE": kernels.TILE},
    ),
]

for kernel, types, constants in VARIANTS:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in MULTIPLES and name not in constants
    }
    compiled = triton.compile(
        ASTSource(kernel, signature, values, multiples),
        target=GPUTarget("cuda", int(sys.argv[1]), 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
    print(kernel.__name__)
