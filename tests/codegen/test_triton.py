"""Triton kernels against eager, in Triton's interpreter: no GPU is needed to see that they are right.

The programs go through the real pipeline up to the schedule; each group then runs as a kernel on CPU
tensors, each library call as itself. The interpreter knows no libdevice, so those functions come from torch.
"""
import functools
import os
import subprocess
import sys

import pytest
import torch
from torch.fx import symbolic_trace

from dovetail import aot, codegen, lower, ops, passes, schedule
from dovetail.codegen import Batch
from dovetail.fake.tensor import Fake, _empty_meta
from dovetail.options import Options
from dovetail.util.noun import replace

pytest.importorskip("triton")

PROGRAMS = {
    "repeated_edges": "lambda x, y: F.pad(x[:1, :3] * 2, (1, 2), mode='replicate') + y[0, 0]",
    "row_constants": "lambda x, y: (lambda s: torch.relu(s.repeat(16, 1) * x[:, :1].repeat(16, 1) + y[:, 1:2].repeat(16, 1)))(x - y)",
    "empty": "lambda x, y: (torch.roll(x[:0], 1, 0) + 1, x[:0].t() * 2, y[:0].sum(0))",
    "divided": "lambda x, y: (x / 8, x.half() / 0.25, y / -2.0, x * 1e-39 / 1024, x / 3)",
    "xlogy": "lambda x, y: (torch.xlogy(x.relu(), y.abs()), F.kl_div(x.log_softmax(1), y.softmax(1), reduction='batchmean'))",
    "pointwise": "lambda x, y: torch.relu(x * 2 + y) - x / (y * y + 1)",
    "columns_of_two_lengths": "lambda x, y: ((x[:4, :64] * 2).sum(0), (x[:32, :64] * 2).sum(0))",
    "scans": "lambda x, y: (torch.cumsum(x * y, 1), x.cumsum(0), (x > 0).cumsum(1), (x * 9).int().cumsum(0), x.half().cumsum(1))",
    "long_scan": "lambda x, y: torch.cumsum(x.reshape(2, -1).repeat(1, 6)[:, :11111] * y[0, 0], 1)",
    "softmax": "lambda x, y: torch.softmax(x + y, -1)",
    "layer_norm": "lambda x, y: F.layer_norm(x + y, (96,), y[0], y[1])",
    "column_sum": "lambda x, y: (x * y).sum(0)",
    "column_sums_by_head": "lambda x, y: (x[:8].repeat(1, 3)[:, :256].softmax(1)[:, :, None] * y.reshape(-1).repeat(40)[:131072].view(8, 256, 64)).sum(1) * x[:8, 1:2]",
    "long_rows_times_one": "lambda x, y: (x.reshape(5, 768).repeat(1, 14)[:, :10240] * y.reshape(-1).softmax(0).repeat(3)[:10240]).sum(1)",
    "long_rows_times_one_variance": "lambda x, y: (x.reshape(5, 768).repeat(1, 14)[:, :10240] * y.reshape(-1).repeat(3)[:10240]).var(1)",
    "rows_of_several": "lambda x, y: (torch.cat([x, y, x]) * y[0]).sum(1)",
    "transpose_add": "lambda x, y: x.t() + y.t() * 2 + x.t().contiguous()",
    "crossed": "lambda x, y: x + y.reshape(96, 40).t()",
    "means": "lambda x, y: (x.mean(), y.amax(1), x.argmax(1), y.argmin(0), (x > 0).any(), x.var(1))",
    "where": "lambda x, y: torch.where(x > y, x, -y).clamp(-1, 1) + torch.arange(96)",
    "cat_pad": "lambda x, y: F.pad(torch.cat([x, y], 1), (1, 2), value=3.0) * 2",
    "gelu_half": "lambda x, y: (F.gelu(x.half() * 3), F.gelu(x.half() * 3, approximate='tanh'), torch.erf(x.half() * y), torch.tanh(x.half() * 2))",
    "half": "lambda x, y: (x.half() * y.half() + 1).sum(1)",
    "integers": "lambda x, y: ((x * 10).long() // 3 % 7, (x * 10).int().sum(0), (x > 0) & (y > 0))",
    "long_rows": "lambda x, y: torch.softmax(x.reshape(2, -1).repeat(1, 6), -1)",
    "long_norm": "lambda x, y: F.layer_norm(x.reshape(2, -1).repeat(1, 6), (11520,))",
    "long_odd_rows": "lambda x, y: torch.log_softmax(x.reshape(2, -1).repeat(1, 6)[:, :11111], -1) * y[:2, :1]",
    "long_argmax": "lambda x, y: (x.reshape(2, -1).repeat(1, 6)[:, :11111] + y[0, 0]).argmax(-1)",
    "long_flags": "lambda x, y: (lambda r: ((r > y[0, 0]).any(-1), (r > -9).all(-1), (r > 0).amax(-1), (r > 0).amin(-1)))(x.reshape(2, -1).repeat(1, 6)[:, :11111])",
    "complex_view": "lambda x, y: torch.fft.rfft(x + y).t()",
    "complex_rotary": "lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(40, 48, 2)) * torch.polar(y[:, :48], x[:, 48:])).flatten(1)",
    "complex_between_library_calls": "lambda x, y: torch.view_as_real(torch.fft.ifft(torch.fft.fft(x) * torch.complex(x, y).conj() / (2 + y.abs()), norm='ortho'))[..., 0].sort().values",
    "complex_sums": "lambda x, y: (lambda z: ((z * 1j).t() + z[:1].t(), z.sum(1), z.abs().mean(), z == z.conj()))(torch.complex(x, y))",
    "long_half_empty": "lambda x, y: (lambda r: torch.log_softmax(torch.where(r > 0, r, float('-inf')), -1))(x.reshape(2, -1).repeat(1, 6))",
    "long_padded": "lambda x, y: torch.log_softmax(F.pad(x.reshape(2, -1).repeat(1, 6)[:, :11111] * y[:2, :1], (0, 9)), -1)",
    "long_rows_and_masked_weights": "lambda x, y: (lambda r, w: (torch.logsumexp(r, 1) * w, w))(x.reshape(2, -1).repeat(1, 6), F.pad(y[:2, 0], (0, 1))[1:])",
    "picked_of_rows": "lambda x, y: (lambda at: (torch.logsumexp(x, 1) - x.gather(1, at[:, None]).squeeze(1)) * (at != 3))((y[:, 0] * 10).long().abs())",
    "cross_entropy": "lambda x, y: F.cross_entropy(x, (y[:, 0] * 10).long().abs())",
    "cross_entropy_bfloat16": "lambda x, y: F.cross_entropy((x * 9).round().bfloat16(), (y[:, 0] * 10).long().abs(), reduction='none')",
    "cross_entropy_far": "lambda x, y: F.cross_entropy(torch.where(y[:, 1:2] > 0, torch.finfo(torch.bfloat16).min, x / x.abs().amax(1, keepdim=True) * torch.where(y[:, 2:3] > 0, 3e38, 1e30)).bfloat16(), (y[:, 0] * 10).long().abs(), reduction='none')",
    "cross_entropy_half": "lambda x, y: F.log_softmax((x.half() * 4).float(), -1).half()",
    "casts": "lambda x, y: (torch.where(x > 0, x.half(), float('-inf')).float(), (x > 0).float() * 2)",
    "product": "lambda x, y: F.gelu(x.half() @ y.half().t()) + x.half()[:, :40]",
    "product_few_rows": "lambda x, y: (torch.addmm(y.half()[0, :40], x.half()[:3], y.half().t()) * 2, y)",
    "product_converted": "lambda x, y: torch.relu((x[:, :80].half() @ y.half().repeat(2, 2)[:, :160]))",
    "product_gated": "lambda x, y: torch.maximum(x.half() @ y.half().t(), x.half() @ (y + 1).half().t())",
    "product_gated_few": "lambda x, y: torch.maximum(x[:5].half() @ y.half().t(), x[:5].half() @ (y + 1).half().t())",
    "product_of_wide": "lambda x, y: (lambda a, w: torch.relu(torch.addmm(y[0, :80], a, w.t())) + a[:, :80])(x.repeat(1, 2)[:5, :160].contiguous(), y.repeat(2, 2)[:, :160].contiguous())",
    "product_in_double": "lambda x, y: (x[:, None, :].half().double() * y[None].half().double()).sum(-1)",
    "product_batch": "lambda x, y: torch.bmm(x[:32].half().view(2, 16, 96), y[:32].half().view(2, 16, 96).transpose(1, 2)) * 3",
    "product_odd_batch": "lambda x, y: torch.bmm(x.half().view(2, 20, 96), y.half().view(2, 20, 96).transpose(1, 2)) * 3",
    "product_transposed": "lambda x, y: (x.half().t()[:, :32] @ y.half()[:32]) * 2",
    "gather": "lambda x, y: x[:, [3, 1, 95]] + F.embedding(torch.arange(40) % 5, y)[:, :3]",
}

RUN = '''
import sys, types, math
import torch, torch.nn.functional as F
from torch.fx import symbolic_trace
from dovetail import aot, lower, ops, passes, schedule
from dovetail.codegen.triton import emit_kernel
from dovetail.passes import products
from dovetail.ir.loop import BufferRef
from dovetail.ir.schedule import Group
from dovetail.ir.expr import Expr, evaluate
from dovetail.ir.types import TensorType, as_reals
from dovetail.fake import to_torch_dtype
from dovetail.util.noun import replace
from dovetail.options import Options
import triton, triton.language as tl
import numpy as np
from triton.runtime.interpreter import TensorHandle

FUNCTIONS = {name: getattr(torch, name) for name in
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc rsqrt floor ceil trunc fmod sqrt copysign atan2 hypot".split()}
FUNCTIONS["nearbyint"] = torch.round

def via_torch(fn):
    def call(*args):
        handles = [a if isinstance(a, tl.tensor) else None for a in args]
        like = next(h for h in handles if h is not None)
        values = [torch.from_numpy(np.array(a.handle.data)) if h is not None else torch.tensor(a) for a, h in zip(args, handles)]
        out = fn(*values).numpy()
        return tl.tensor(TensorHandle(out.astype(like.handle.data.dtype), like.handle.dtype), like.type)
    return call

libdevice = types.SimpleNamespace(**{name: via_torch(fn) for name, fn in FUNCTIONS.items()})
from dovetail.codegen.triton import prelude
prelude.libdevice = libdevice
prelude.follow = lambda: None

KNOWN = {}

def run_group(group, buffers, memory, folder):
    made = emit_kernel(group, {name: replace(buffer, type=as_reals(buffer.type)) for name, buffer in buffers.items()})
    kernel = KNOWN.setdefault(made.kernel.key, made.kernel)  # as in a program: the first of equal kernels serves
    path = f"{folder}/k_{kernel.key}.py"
    with open(path, "w") as file:
        file.write("import triton\\nimport triton.language as tl\\n" + kernel.text)
    import importlib.util
    spec = importlib.util.spec_from_file_location(f"k_{kernel.key}", path)
    module = importlib.util.module_from_spec(spec)
    module.dv, module.libdevice = prelude, libdevice
    spec.loader.exec_module(module)
    fn = next(v for v in vars(module).values() if type(v).__name__ == "InterpretedFunction")
    for choice in kernel.blocks[:2]:
        blocks = choice.constants(kernel.constants)
        sizes = []
        for size, k in made.grid:
            axis = kernel.constants[k]
            sizes.append(-(-size.value // blocks[axis]))
        given = [torch.view_as_real(memory[p]) if memory[p].is_complex() else memory[p] for p in made.params]
        fn[tuple(sizes)](*given, **blocks)

def execute(fn, inputs, folder, parts):
    gm = symbolic_trace(fn)
    joint = aot.trace_joint(gm, inputs)
    graph = passes.optimize(ops.decompose(joint.graph))
    products.can_open = lambda node: node.op in products.PRODUCTS
    graph = products.open_products(aot.partition(graph, joint.signature).forward, lambda node: parts)
    loops = lower.lower(graph)
    plan = schedule.schedule(loops, Options())
    buffers = {b.name: b for b in loops.buffers}
    memory = dict(zip(loops.inputs, [*inputs, *joint.constants]))
    def flat(type):
        n = 1 + sum((s.value - 1) * t.value for s, t in zip(type.shape, type.stride))
        return torch.full((max(n, 1),), 77).to(to_torch_dtype(type.dtype))
    for b in loops.buffers:
        if b.kind != "input": memory[b.name] = flat(b.type)
    def view(ref):
        m = memory[ref.buffer]
        m = m if m.dtype == to_torch_dtype(ref.type.dtype) else m.view(-1).view(to_torch_dtype(ref.type.dtype))
        return torch.as_strided(m, [s.value for s in ref.type.shape], [s.value for s in ref.type.stride], ref.offset.value)
    def arg(a):
        if isinstance(a, BufferRef): return view(a)
        if isinstance(a, Expr): return a.value
        if isinstance(a, tuple): return [arg(x) for x in a]
        return a
    kernels = 0
    for step in plan.steps:
        if isinstance(step, Group):
            run_group(step, buffers, memory, folder); kernels += 1
        else:
            space, op, overload = step.op.split(".")
            outs = getattr(getattr(getattr(torch.ops, space), op), overload)(*map(arg, step.args), **{k: arg(v) for k, v in step.kwargs})
            for name, out in zip(step.outputs, outs if isinstance(outs, (tuple, list)) else [outs]):
                ty = buffers[name].type
                memory[name] = flat(ty)
                torch.as_strided(memory[name], [s.value for s in ty.shape], [s.value for s in ty.stride]).copy_(out)
    return [view(o) if isinstance(o, BufferRef) else o for o in loops.outputs], kernels

torch.manual_seed(0)
x, y = torch.randn(40, 96), torch.randn(40, 96)
failed = 0
for name, text in PROGRAMS.items():
    fn = eval(text)
    wanted = fn(x, y)
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    traced = (lambda f: lambda x, y: (lambda r: tuple(r) if isinstance(r, (tuple, list)) else (r,))(f(x, y)))(fn)
    try:
        for parts in (1, 2) if "product" in name else (1,):
            got, kernels = execute(traced, [x, y], sys.argv[1], parts)
            for a, b in zip(got, wanted):
                torch.testing.assert_close(a, b, rtol=2e-6 if b.dtype == torch.float32 else None, atol=2e-6 if b.dtype == torch.float32 else None)
            print("ok", name, kernels)
    except Exception as error:
        failed += 1
        import traceback; traceback.print_exc(limit=-3)
        print("FAILED", name, type(error).__name__, str(error)[:600])
sys.exit(failed)
'''


def test_programs_in_the_interpreter(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(f"PROGRAMS = {PROGRAMS!r}\n" + RUN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(path), str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def fake(device, *shape, dtype=torch.float32):
    stride = torch.empty(shape, device="meta").stride()
    return Fake(_empty_meta(shape, stride, dtype), torch.device(device))


def emitted(program, *examples):
    joint = aot.trace_joint(symbolic_trace(program), list(examples))
    loops = lower.lower(aot.partition(passes.optimize(ops.decompose(joint.graph)), joint.signature).forward)
    return codegen.emit(schedule.plan(schedule.schedule(loops, Options())), Options())


def host_text(program, *examples):
    return emitted(program, *examples).host


def test_a_gpu_reads_a_copy_of_what_the_cpu_made():
    def program(x, n):
        total = n.any()
        return x * total, ~total

    text = host_text(program, fake("cuda:0", 64), fake("cpu", 3))
    assert "= moved(h_" in text and text.index("= moved(h_") < text.index("launch of mul")


def test_a_kernel_is_given_a_single_number_of_the_cpu_by_value():
    def program(x, n, step):
        total = n.prod()
        return x * total / step, total + 1

    text = host_text(program, fake("cuda:0", 64), fake("cpu", 3), fake("cpu"))
    assert "data_of(inputs[2]), &" in text and "data_of(h_" in text and "= moved(h_" not in text


def test_the_first_kernel_waits_before_it_loads_and_the_others_load_weights_before():
    def program(x, w):
        total = (x * 2).sum(1)
        return total.softmax(0), (total * w).sum(1)

    made = emitted(program, fake("cuda:0", 512, 512), fake("cuda:0", 256, 512))
    waits = [kernel.text.index("dv.follow()") < kernel.text.index("tl.load") for kernel in made.kernels]
    assert waits[0] and not all(waits)
    assert made.host.count(", true, stream") == len(waits)


def test_a_program_that_waits_for_all_others_counts_small_inputs_before():
    given = fake("cuda:0", 16384, 1024, dtype=torch.bfloat16), fake("cuda:0", 16384, dtype=torch.int64)
    made = emitted(lambda x, at: torch.nn.functional.cross_entropy(x, at), *given)
    first, second = (kernel.text for kernel in made.kernels)
    assert "tl.int1)" not in first and "dv.under(" in first
    assert "dv.under(" not in emitted(lambda x, at: torch.softmax(x, -1), *given).kernels[0].text  # its results show
    before, after = second.split("dv.follow()")
    assert [text.count("tl.load(") for text in (before, after)] == [1, 1] == [text.count("tl.sum(") for text in (before, after)]


def test_equal_kernels_on_different_buffers_are_one_launch():
    def program(a, b, c, d):
        return a * 2 + 1, b * 2 + 1, c.cos(), d * 2 + 1

    text = host_text(program, *(fake("cuda:0", 4096) for _ in range(4)))
    assert text.count('TRY("launch of') == 2
    (launch,) = (line for line in text.splitlines() if "_x3" in line)
    assert "4096, 3, " in launch


def test_buffers_of_kernels_in_one_launch_have_names_of_their_own():
    def program(n, a, b, c):  # a kernel reads sub and writes sub__1, as its second member's sub might be called
        rate = n.sum() - 1
        return rate, a.sub_(rate), b.sub_(rate), c.sub_(rate)

    kernels = emitted(program, fake("cuda:0", 1 << 20), *(fake("cuda:0", size) for size in (512, 1 << 16, 1 << 16))).kernels
    assert any("_x2" in kernel.text and "sub__1" in kernel.text for kernel in kernels)
    for kernel in kernels:
        compile(kernel.text, kernel.name, "exec")  # two parameters of one name are a SyntaxError


def test_kernels_of_numbers_that_are_read_later_are_one_launch():
    def program(a, b, x, y):
        return torch.mm(x, y) * (a * 3).cos().sum(), torch.mm(y, x) * (b * 3).cos().sum()

    given = [fake("cuda:0", 2), fake("cuda:0", 2), fake("cuda:0", 64, 64), fake("cuda:0", 64, 64)]
    assert sum("_x2" in line for line in host_text(program, *given).splitlines()) == 1


def test_a_counter_that_is_read_beside_is_counted_in_place():
    def program(counter, x, y):
        at = counter + 2
        counter.add_(1)
        return torch.mm(x, y) * torch.where(at < 0, 5, at).cos()

    joint = aot.trace_joint(symbolic_trace(program), [fake("cuda:0"), *(fake("cuda:0", 8, 8) for _ in range(2))])
    graph = aot.partition(ops.decompose(joint.graph), joint.signature).forward
    loops = lower.lower(replace(graph, updates=joint.updates))
    assert "reuse" in [place.kind for _, place in schedule.plan(schedule.schedule(loops, Options())).places]


def test_a_kernel_joins_others_only_where_order_does_not_matter():
    batch = Batch([], reads={"a"}, writes={"x"}, others_read={"c"}, others_write={"d"})
    assert batch.takes({"a", "b", "c"}, {"y"}, 4)
    assert not batch.takes({"b"}, {"y"}, 1000)
    for reads, writes in (({"x"}, {"y"}), ({"b"}, {"a"}), ({"b"}, {"x"}), ({"d"}, {"y"}), ({"b"}, {"c"}), ({"b"}, {"d"})):
        assert not batch.takes(reads, writes, 4)


def test_rows_at_computed_places_are_reduced_as_rows():
    given = fake("cuda:0", 9, 32000), fake("cuda:0", 64, dtype=torch.int64)
    (kernel,) = emitted(lambda x, at: x.index_select(0, at).argmax(-1), *given).kernels
    assert {blocks.x for blocks in kernel.blocks} <= {1, 2}  # tiles of many rows were two programs for the whole GPU


def test_what_is_made_of_smaller_values_is_not_stored_on_a_gpu():
    def program(x, y):
        apart = (x.unsqueeze(1) - y.unsqueeze(0)).exp() * 3 + x.unsqueeze(1)
        return apart.sum(0), (apart * apart).sum(1)

    text = host_text(program, fake("cuda:0", 2048), fake("cuda:0", 1024))
    assert str(2048 * 1024 * 4) not in text and "{2048, 1024}" not in text


def test_lowering_a_recurrence_takes_time_by_its_length():
    """Each step reads the one before several times: walks over all paths would never end."""

    def program(given, decay):
        x = given.unbind(0)
        top, sums, outs = x[0], x[0], []
        for i in range(1, 40):
            most = torch.maximum(top, x[i])
            sums = sums * torch.exp(top - most) + torch.exp(x[i] - most) * sums
            top = torch.maximum(top + decay, most)
            outs.append(sums / top)
        return tuple(outs)

    host_text(program, fake("cuda:0", 40, 4096), fake("cuda:0", 4096))


def test_sums_over_columns_take_large_blocks_unless_there_are_very_many_loads():
    def first_blocks(count):
        program = torch.fx.Graph()
        given = [program.placeholder(f"x{i}") for i in range(count)]
        product = functools.reduce(lambda a, b: program.call_function(torch.mul, (a, b)), given)
        program.output((program.call_function(torch.sum, (product, 0)),))
        module = torch.fx.GraphModule(torch.nn.Module(), program)
        joint = aot.trace_joint(module, [fake("cuda:0", 65536, 256) for _ in given])
        loops = lower.lower(aot.partition(ops.decompose(joint.graph), joint.signature).forward)
        (kernel,) = codegen.emit(schedule.plan(schedule.schedule(loops, Options())), Options()).kernels
        return kernel.blocks[0]

    few, many = first_blocks(14), first_blocks(40)
    assert few.x * few.r == 4096 and many.x * many.r == 512
