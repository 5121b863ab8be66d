"""Matrices that meet the GPU's matrix units have rows of whole vectors, and the values stay right."""
from __future__ import annotations

import torch

from dovetail.ir.loop import Loops
from dovetail.ir.parse import parse_graph
from dovetail.lower import lower
from tests.lower.interpret import run_loops

ODD_ROWS = """
def forward(h: bf16[16, 128] cuda, w: bf16[128, 37] cuda):
    logits = aten.mm.default(h, w)            # bf16[16, 37] cuda
    wide = prims.convert(logits, "f32")       # f32[16, 37] cuda
    grown = prims.exp(wide)                   # f32[16, 37] cuda
    narrow = prims.convert(grown, "bf16")     # bf16[16, 37] cuda
    folded = prims.reshape(narrow, (2, 8, 37))    # bf16[2, 8, 37] cuda
    rows = prims.reshape(folded, (16, 37))    # bf16[16, 37] cuda
    turned = prims.permute(rows, (1, 0))      # bf16[37, 16]{1, 37} cuda
    back = aten.mm.default(turned, h)         # bf16[37, 128] cuda
    return (logits, back)
"""


def strides(loops: Loops) -> dict[str, list[int]]:
    return {b.name: [s.value for s in b.type.stride] for b in loops.buffers}


def lowered(text: str) -> Loops:
    return lower(parse_graph(text))


def test_products_and_their_operands_get_whole_vectors():
    deep = ODD_ROWS.replace("16", "128").replace("(2, 8, 37)", "(2, 64, 37)").replace("[2, 8,", "[2, 64,")
    deep = deep.replace("bf128", "bf16")
    found = strides(lowered(deep))
    assert found["logits"] == [40, 1] and found["narrow"] == [40, 1] and found["back"] == [128, 1]
    assert found["logits_copy"] == [37, 1]  # the caller gets eager's strides
    h, w = torch.randn(128, 128).bfloat16() / 16, torch.randn(128, 37).bfloat16() / 16
    logits, back = run_loops(lowered(deep), [h, w])
    assert torch.equal(logits, h @ w)
    assert torch.equal(back, (h @ w).float().exp().bfloat16().t() @ h)


def test_shallow_products_and_other_devices_are_left_alone():
    shallow = ODD_ROWS.replace("[16, 128]", "[16, 64]").replace("[128, 37]", "[64, 37]")
    shallow = shallow.replace("[37, 128]", "[37, 64]")
    for text in (shallow, ODD_ROWS.replace(" cuda", "")):
        assert strides(lowered(text))["logits"] == [37, 1]
