"""Which values only reach 16-bit results: the GPU may compute those faster."""

import torch
from torch.fx import symbolic_trace

from dovetail import aot, lower, ops, passes


def loose(fn, *inputs):
    joint = aot.trace_joint(symbolic_trace(fn), list(inputs))
    graph = passes.optimize(ops.decompose(joint.graph))
    loops = lower.lower(aot.partition(graph, joint.signature).forward)
    return {b.name.rstrip("0123456789_"): b.is_loose for b in loops.buffers if b.kind != "input"}


def test_statistics_of_a_rounded_softmax():
    found = loose(lambda x: (torch.log_softmax(x, -1),), torch.randn(4, 64).bfloat16())
    assert found["log_softmax_max"] and found["log_softmax_sum"]


def test_what_the_caller_sees_is_exact():
    found = loose(lambda x: (torch.log_softmax(x.float(), -1),), torch.randn(4, 64).bfloat16())
    assert not found["log_softmax_max"] and not found["log_softmax_sum"]


def test_comparisons_see_the_last_bit():
    found = loose(lambda x: (x.float().exp().sum(-1) > 3,), torch.randn(4, 64).bfloat16())
    assert not any(found.values())


def test_what_no_rounding_reaches_does_not_make_a_row_exact():
    def program(x, at):
        mask = (at * 3 // 2) > 5
        return (x.float().exp().sum(-1) * mask).bfloat16(), mask.sum().bfloat16()

    found = loose(program, torch.randn(4, 64).bfloat16(), torch.arange(4))
    assert found.pop("gt") and found
