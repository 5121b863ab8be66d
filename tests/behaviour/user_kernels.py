"""Programs that launch Triton kernels of their own. Run by test_user_kernels.py in Triton's interpreter,
which has to be chosen before Triton is imported: `TRITON_INTERPRET=1 python -m tests.behaviour.user_kernels`.
"""

import torch
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

import dovetail


@triton.jit
def add_kernel(x, y, o, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(o + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def scale_kernel(x, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def read(p, i, inside):
    return tl.load(p + i, mask=inside)


@triton.jit
def transpose_kernel(x, o, rows, columns, x_row, x_column, o_row, o_column, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    inside = (i < rows) & (j < columns)
    tl.store(o + i * o_row + j * o_column, tl.load(x + i * x_row + j * x_column, mask=inside), mask=inside)


def time_once(launch, quantiles):
    launch()
    return [1.0, 1.0, 1.0]


@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["n"], do_bench=time_once)
@triton.heuristics({"EVEN": lambda given: given["n"] % given["BLOCK"] == 0})
@triton.jit
def tuned_kernel(x, y, o, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o + i, read(x, i, i < n) - read(y, i, i < n), mask=i < n)


def launch(kernel, x, y, **constants):
    o = torch.empty_like(x)
    n = o.numel()
    kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, o, n, **constants)
    return o


def fused_around(x, y):
    return launch(add_kernel, x * 2, y, BLOCK=32).relu() + 1


def written_in_place(x, y):
    z = x + 1
    scale_kernel[(8,)](z, z.numel(), 2.5, BLOCK=32)
    return z * y


def input_written_twice(x, y):
    scale_kernel[(8,)](x, x.numel(), 2.5, BLOCK=32)
    scale_kernel[(8,)](x, x.numel(), factor=2.0, BLOCK=32)
    return x + y


def view_written(x, y):
    z = torch.stack([x, y])
    scale_kernel[(8,)](z[1], x.numel(), 2.0, 32)
    return z


def beyond_the_view(x, y):
    """The kernel is given the address of the first element, and writes to all of them."""
    z = x + y
    scale_kernel[(8,)](z[:1], z.numel(), 2.0, 32)
    return z


def kept_in_between(x, y):
    z = x.sin()
    scale_kernel[(8,)](z, z.numel(), 2.5, BLOCK=32)
    before = z.clone()
    scale_kernel[(8,)](z, z.numel(), 2.5, BLOCK=32)
    return z, before, z + y


def strided(x, y):
    """Strides are passed as numbers, so the tensors must have them."""
    wide = (x * 2).repeat(4, 1)[:, ::2].t()
    o = torch.empty(4, wide.shape[0]).t()
    transpose_kernel[(1,)](wide, o, *wide.shape, *wide.stride(), *o.stride(), BLOCK=128)
    return o.relu()


def tuned(x, y):
    return launch(tuned_kernel, x, y) * 2


try:
    wrap_triton(add_kernel)
except RuntimeError:  # torch 2.11 wraps no kernel that runs in the interpreter

    def wrap_triton(kernel):
        return kernel


@triton_op("dovetail_test::add", mutates_args={})
def add_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    o = torch.empty_like(x)
    n = o.numel()
    wrap_triton(add_kernel)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, o, n, 16)
    return o


@triton_op("dovetail_test::add_trained", mutates_args={})
def trained_op(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return launch(wrap_triton(add_kernel), x, y, BLOCK=16)


trained_op.register_autograd(
    lambda ctx, grad: (add_op(grad, ctx.saved_tensors[0]), grad),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return launch(add_kernel, x, y, BLOCK=32)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return launch(add_kernel, grad, x, BLOCK=64), launch(add_kernel, grad, y, BLOCK=64)


def by_function(x, y):
    return Added.apply(x.sin(), y) ** 2


def by_trained_op(x, y):
    return trained_op(x, y).sin()


INFERENCE = {
    fused_around: 2, written_in_place: 2, input_written_twice: 1, view_written: 1, beyond_the_view: 1,
    kept_in_between: 3, strided: None, tuned: 1, (lambda x, y: add_op(x, y).sin()): 1,
}  # fmt: skip
"""program -> how many kernels of ours surround its own (one that serves twice counts once): no copies, no fills"""
TRAINING = (by_function, by_trained_op)


def check(program, kernels, needs_grad, dynamic):
    dovetail.reset()
    compiled = dovetail.compile(
        program, fullgraph=True, dynamic=dynamic, options={"fallback_to_eager": False}
    )
    for size in (100, 130):
        x, y = (torch.randn(size, requires_grad=needs_grad) for _ in range(2))
        x_eager, y_eager = (t.detach().clone().requires_grad_(needs_grad) for t in (x, y))
        got, wanted = compiled(x, y), program(x_eager, y_eager)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
        torch.testing.assert_close(x, x_eager)
        if size == 100 and kernels is not None:
            made = dovetail.stats()["kernels"]
            assert made == kernels, f"{made} kernels, not {kernels}"
        if needs_grad:
            got.sum().backward()
            wanted.sum().backward()
            torch.testing.assert_close((x.grad, y.grad), (x_eager.grad, y_eager.grad))
    assert dovetail.stats()["graph_breaks"] == 0


def unknown_writes():
    """A kernel that makes pointers out of numbers breaks the graph, and still runs."""

    @triton.jit
    def indirect(addresses, n, BLOCK: tl.constexpr):
        p = tl.load(addresses).to(tl.pointer_type(tl.float32))
        i = tl.arange(0, BLOCK)
        tl.store(p + i, tl.load(p + i, mask=i < n) + 1, mask=i < n)

    def program(x, addresses):
        y = x * 2
        indirect[(1,)](addresses, y.numel(), BLOCK=128)
        return y

    x = torch.randn(8)
    dovetail.reset()
    told = dovetail.explain(program)(x, torch.tensor([x.data_ptr()]))
    assert "B17" in str(told), told


if __name__ == "__main__":
    torch.manual_seed(0)
    for program, kernels in INFERENCE.items():
        check(program, kernels, False, None)
    for program in TRAINING:
        check(program, None, True, None)
    for program in (view_written, strided, tuned):
        check(program, None, False, True)
    unknown_writes()
