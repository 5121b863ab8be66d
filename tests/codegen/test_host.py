"""The host program: steps that repeat are functions, and what they share is passed between them."""
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dovetail
from dovetail.codegen.host.outline import outline
from dovetail.events import EVENTS


def test_repeated_steps_become_one_function() -> None:
    before = ["Temporaries arena(64);", "const int64_t s0 = ints[0];"]
    steps = [
        [
            f"// layer {k}",
            f"float* p_{k} = (float*)(arena.start + {8 * k});",
            f'Tensor h_{k}; TRY("make", make(s0, &h_{k}.handle))    // user.py:{k}',
            f"float* q_{k} = (float*)data_of(inputs[{k}]);",
            f"run(p_{k}, q_{k}, p_{max(k - 1, 0)});",
        ]
        for k in range(5)
    ]
    functions, body = outline(before, steps, [f"give(h_{k});" for k in range(5)])
    assert functions == [
        "static int32_t step_1(Python* python, void** inputs, float*& v0, Temporaries& v1, int64_t v2, "
        "Tensor& v3, const int64_t v5, int64_t v7, float* v8) {",
        "    v0 = (float*)(v1.start + v2);",
        '    TRY("make", make(v5, &v3.handle))',
        "    float* v6 = (float*)data_of(inputs[v7]);",
        "    run(v0, v6, v8);",
        "    return 0;",
        "}",
    ]
    assert body[:5] == steps[0]
    assert body[5:8] == [
        "// layer 1",
        "float* p_1; Tensor h_1;",
        "if (step_1(python, inputs, p_1, arena, 8, h_1, s0, 1, p_0)) return 1;    // user.py:1",
    ]


def test_a_sequence_that_comes_again_is_one_function() -> None:
    """Of two layers of different length; what stays inside of a layer is declared there."""
    steps = [["float* p_0 = (float*)data_of(inputs[0]);"]]
    for k in range(1, 5):
        steps += [[f"float* q_{k} = up(p_{k - 1});"], [f"float* p_{k} = down(q_{k});"]]
    for k in range(5, 9):
        steps += [[f"float* q_{k} = up(p_{k - 1});"], [f"float* r_{k} = on(q_{k});"], [f"float* p_{k} = by(r_{k});"]]
    functions, body = outline([], steps, ["give(p_8);"])
    assert functions == [
        "static int32_t step_1(Python* python, void** inputs, float* v1, float*& v2) {",
        "    float* v0 = up(v1);",
        "    v2 = down(v0);",
        "    return 0;",
        "}",
        "static int32_t step_5(Python* python, void** inputs, float* v1, float*& v3) {",
        "    float* v0 = up(v1);",
        "    float* v2 = on(v0);",
        "    v3 = by(v2);",
        "    return 0;",
        "}",
    ]
    assert body[1:3] == ["float* p_1;", "if (step_1(python, inputs, p_0, p_1)) return 1;"]
    assert body[-2:] == ["float* p_8;", "if (step_5(python, inputs, p_7, p_8)) return 1;"]


def test_a_step_that_needs_an_array_of_another_stays_where_it_is() -> None:
    steps = [[f"use(shared, {k});"] for k in range(4)]
    assert outline(["const int64_t shared[] = {1};"], steps, []) == ([], [step[0] for step in steps])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.sort(self.mix(self.norm(x)), -1).values  # a call of the library that returns two tensors
        return x + F.relu(self.out(kept))


@pytest.mark.parametrize("dynamic", [False, True])
def test_layers_share_their_host_code(dynamic: bool) -> None:
    torch.manual_seed(0)
    EVENTS.clear()
    model = nn.Sequential(*(Block() for _ in range(6)))
    compiled = dovetail.compile(model, dynamic=dynamic, options={"fallback_to_eager": False})
    for rows in (3, 5):
        x = torch.randn(rows, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        compiled(a).sum().backward()
        model(b).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)
    executables: list[Any] = [e["value"] for e in EVENTS.of("stage") if e["stage"] == "90.executable"]
    assert executables and all("static int32_t step_" in made.program.host for made in executables)
