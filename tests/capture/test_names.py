"""Arguments may be called anything: the entry's text has names of its own, and they do not clash."""

import torch

import dovetail


def program(out, type, _r, cell_x, graph_0, list, float=2.0, *, __s0=1, user_globals=None):
    y = out * float + type
    dovetail.graph_break()
    out.add_(1)
    return [y + _r, list[0], cell_x, graph_0 * 2, __s0, user_globals]


def test_arguments_named_like_the_entry_s_own_names():
    def args():
        return torch.ones(3), torch.ones(3) * 2, torch.ones(3) * 3, 4, torch.ones(3) * 5, [torch.ones(3) * 6]

    compiled = dovetail.compile(program)
    for _ in range(2):
        ours, theirs = args(), args()
        for a, b in zip(compiled(*ours), program(*theirs)):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert torch.equal(ours[0], theirs[0])
