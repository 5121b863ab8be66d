"""A Plan as one C++ function that allocates, launches kernels and calls libraries.

    Plan, kernels -> text

    extern "C" int32_t run(void** inputs, int64_t* ints, double* floats, void** outputs, Python* python) {
        float* p_x = (float*)data_of(inputs[0]);
        Tensor h_o;  TRY_OP("out of memory", aoti_torch_empty_strided(2, z0, z1, 6, 0, 0, &h_o.handle))
        float* p_o = (float*)data_of(h_o);
        run_kernel(0, p_x, p_o);
        TRY("o", aoti_torch_new_tensor_handle(h_o, &outputs[0]))
        return 0;
    }
"""
from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from torch._library.custom_ops import OPDEFS

from dovetail.codegen.analysis import Launchable, identifier
from dovetail.codegen.cpp.ops import C_TYPE, c_expr
from dovetail.codegen.host.outline import outline
from dovetail.codegen.host.prelude import DEVICE_CODE, HEAD, TORCH_CODE
from dovetail.ir.expr import ZERO, Expr, const, mul
from dovetail.ir.loop import Buffer, BufferRef, ExternArg, Scalar
from dovetail.ir.program import PythonCall, Result, Slot
from dovetail.ir.schedule import LINE, Extern, Group, Place, Plan
from dovetail.ir.types import Device, TensorType
from dovetail.util.library import find_op
from dovetail.util.noun import Noun, field

LAID: Final = ("arena", "block", "within")
"""Places that are memory, not tensors."""


class HostWriter(Noun, frozen=False):
    """Statements so far, and how each buffer is reached."""

    plan: Plan
    buffers: dict[str, Buffer]
    places: dict[str, Place]
    lines: list[str] = field(default_factory=list)
    constants: dict[tuple[int, ...], str] = field(default_factory=dict)
    shared: dict[tuple[Expr | int, ...], str] = field(default_factory=dict)
    pointers: dict[str, str] = field(default_factory=dict)
    handles: dict[str, str] = field(default_factory=dict)
    """Buffer -> text of a handle for the whole of it."""
    python_calls: list[PythonCall] = field(default_factory=list)
    views: dict[BufferRef, str] = field(default_factory=dict)
    counter: int = 0
    written: frozenset[str] = frozenset()
    """Inputs that the program writes in place."""
    read: frozenset[str] = frozenset()
    """Buffers that a kernel, a library call or the caller reads."""

    def __call__(self, text: str) -> None:
        self.lines += text.split("\n")

    def fresh(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}{self.counter}"

    def sizes(self, values: tuple[Expr | int, ...]) -> str:
        """An array of these numbers; constant ones are shared."""
        if not values or values in self.shared:
            return self.shared[values] if values else "nullptr"
        if all(v.is_const for v in values if isinstance(v, Expr)):
            key = tuple(v.value if isinstance(v, Expr) else v for v in values)
            self.shared[values] = self.constants.setdefault(key, f"z{len(self.constants)}")
            return self.shared[values]
        texts = [c_expr(v) if isinstance(v, Expr) else str(v) for v in values]
        name = self.fresh("n")
        self(f"const int64_t {name}[] = {{{', '.join(texts)}}};")
        return name

    # -- buffers

    def pointer(self, name: str) -> str:
        """A typed pointer to the buffer's first element."""
        if name not in self.pointers:
            kind = C_TYPE.get(self.buffers[name].type.dtype.real, "char")
            place = self.places[name]
            text = f"p_{identifier(name)}"
            if place.kind == "arena":
                source = f"(arena.start + {c_expr(place.offset or ZERO)})"
            elif place.kind == "block":
                source = f"{self.block(cast(str, place.of))}.start"
            else:
                source = f"data_of({self.handle(cast(str, place.of) if place.kind == 'within' else name)})"
            self(f"{kind}* {text} = ({kind}*){source};")
            self.pointers[name] = text
        return self.pointers[name]

    def block(self, first: str) -> str:
        """Memory of a large temporary, and of those that take it over."""
        if first not in self.handles:
            self.handles[first] = self.fresh("block")
            lines = -(-self.buffers[first].type.storage_bytes.value // LINE)
            self.temporaries(self.handles[first], const(lines * LINE))
        return self.handles[first]

    def temporaries(self, name: str, size: Expr) -> None:
        device = self.plan.schedule.loops.device
        kind = "Temporaries" if device.kind == "cpu" else "DeviceTemporaries"
        where = "" if device.kind == "cpu" else f", {device_code(device)}"
        self(f"{kind} {name}({c_expr(size)}{where});")
        self(f'TRY_OP("out of memory for temporaries", {name}.missing)')

    def handle(self, name: str) -> str:
        """A handle for the whole buffer."""
        place = self.places[name]
        if place.kind in ("block", "within"):
            return self.view(BufferRef(name, self.buffers[name].type, ZERO))
        if name not in self.handles:
            assert place.kind in ("output", "arena", "reuse"), name
            if place.of is not None:
                self.handles[name] = self.handles[place.of]
            elif place.kind == "output":
                self.allocate(name)
            else:
                return self.view(BufferRef(name, self.buffers[name].type, ZERO))
        return self.handles[name]

    def extents(self, type: TensorType) -> str:
        """Rank, sizes and strides,"""
        return f"{type.ndim}, {self.sizes(type.shape)}, {self.sizes(type.stride)}"

    def kind(self, type: TensorType) -> str:
        """and element type and device, as the shim takes them."""
        return f"{TORCH_CODE[type.dtype]}, {device_code(type.device)}"

    def allocate(self, name: str) -> None:
        type = self.buffers[name].type
        text = f"h_{identifier(name)}"
        call = f"aoti_torch_empty_strided({self.extents(type)}, {self.kind(type)}, &{text}.handle)"
        self(f'Tensor {text}; TRY_OP("out of memory", {call})')
        self.handles[name] = text

    def view(self, ref: BufferRef) -> str:
        """A handle for a window onto a buffer."""
        place = self.places[ref.buffer]
        whole = self.buffers[ref.buffer].type
        is_whole = ref.offset is ZERO and (ref.type.shape, ref.type.stride) == (whole.shape, whole.stride)
        if place.kind not in LAID and is_whole:
            return self.handle(ref.buffer)
        if ref not in self.views:
            text = self.fresh("view")
            shape = self.extents(ref.type)
            if place.kind in LAID or ref.type.dtype is not whole.dtype:
                code, offset = self.kind(ref.type), mul(ref.offset, ref.type.dtype.bytes)
                start = f"(char*){self.pointer(ref.buffer)} + {c_expr(offset)}"
                call = f"WINDOW({text}, {start}, {shape}, {code})"
            else:
                source = self.handle(ref.buffer)
                start = c_expr(ref.offset)
                call = f"VIEW({text}, {source}, {shape}, {start})"
            self(f'Tensor {text}; TRY("a view", {call})')
            self.views[ref] = text
        return self.views[ref]

    def forget_views(self, name: str) -> None:
        """Another buffer may take this one's memory: its windows are not used again."""
        for ref in [ref for ref in self.views if ref.buffer == name]:
            self(f"{self.views.pop(ref)}.drop();")

    def settle(self, name: str, handle: str) -> None:
        """A buffer that a library call has just made. One that nobody reads (the statistics of attention
        in inference, say) may look as the library pleases."""
        type = self.buffers[name].type
        self.handles[name] = handle
        if name not in self.read:
            return
        call = f"settle({handle}, {self.extents(type)}, {self.kind(type)})"
        self(f'TRY("{name}: unexpected shape", {call})')


def device_code(device: Device) -> str:
    """Type and index as the shim takes them."""
    return f"{DEVICE_CODE[device.kind]}, {device.index or 0}"


class HostText(Noun):
    text: str
    python_calls: tuple[PythonCall, ...]
    results: tuple[Result, ...]
    outputs: int


def emit_host(plan: Plan, launches: dict[Group, Launchable], kernel_index: dict[str, int]) -> HostText:
    """`launches` by group; `kernel_index` is the position of each kernel's key in dv_kernels."""
    loops = plan.schedule.loops
    writer = HostWriter(plan, {b.name: b for b in loops.buffers}, dict(plan.places))
    steps = plan.schedule.steps
    written = {name for step in steps for name in step.written_buffers}
    writer.written = frozenset(name for name in written if writer.buffers[name].kind == "input")
    writer.read = frozenset((*loops.returned, *(name for step in steps for name in step.read_buffers)))
    _bind_inputs(writer)
    _bind_symbols(writer)
    if plan.arena_bytes is not ZERO:
        writer.temporaries("arena", plan.arena_bytes)
    last, ends = _last_reads(plan), [len(writer.lines)]
    for k, step in enumerate(plan.schedule.steps):
        if isinstance(step, Extern):
            emit_extern(writer, step)
        elif (made := launches.get(step)) is not None:  # else it runs with an equal one
            before = launches.get(cast(Group, steps[k - 1])) if k > 0 else None
            follows = made.is_first or (before is not None and before.kernel.language == "triton")
            _launch(writer, step, made, kernel_index[made.kernel.key], follows)
        _free(writer, k, last)
        ends.append(len(writer.lines))
    results, count = _return(writer)
    functions: list[str] = []
    if loops.device.kind == "cpu":
        parts = [writer.lines[start:end] for start, end in zip(ends, ends[1:])]
        functions, calls = outline(writer.lines[: ends[0]], parts, writer.lines[ends[-1] :])
        writer.lines[ends[0] : ends[-1]] = calls
    head = HEAD + DISPATCH_HEAD + ("" if loops.device.kind == "cpu" else CUDA_HEAD)
    head = head.replace("%(kernels)s", str(max(len(kernel_index), 1))).replace("%(device)s", shim(writer))
    listed = [(name, ", ".join(map(str, key))) for key, name in writer.constants.items()]
    constants = [f"static const int64_t {name}[] = {{{numbers}}};" for name, numbers in listed]
    if loops.device.kind != "cpu":
        writer.lines.insert(0, f"OnDevice on_device({loops.device.index or 0});")
    body = ["    " + line for line in writer.lines]
    takes = "void** inputs, int64_t* ints, double* floats, void** outputs, Python* python"
    start = f'extern "C" int32_t run({takes}) {{'
    run = [start, "    NoGrad no_grad;", *body, "    return 0;", "}", ""]
    text = "\n".join([head, *constants, *functions, *run])
    return HostText(text, tuple(writer.python_calls), results, count)


def _bind_inputs(writer: HostWriter) -> None:
    counts = {"t": 0, "i": 0, "f": 0}
    loops = writer.plan.schedule.loops
    for name, kind in zip(loops.inputs, loops.kinds):
        position = counts[kind]
        counts[kind] += 1
        if kind == "t":
            writer.handles[name] = f"inputs[{position}]"
        elif kind == "i":
            writer(f"const int64_t {name} = ints[{position}];")
        else:
            writer(f"const double {name} = floats[{position}];")


def _bind_symbols(writer: HostWriter) -> None:
    """Symbols that no integer input names are read from the tensors' sizes and strides."""
    known = set(writer.plan.schedule.loops.inputs)
    for buffer in writer.plan.schedule.loops.buffers:
        for what in ("size", "stride") if buffer.kind == "input" else ():
            extents = buffer.type.shape if what == "size" else buffer.type.stride
            missing = [(d, e) for d, e in enumerate(extents) if e.op == "sym" and e.name not in known]
            if missing:
                read, handle = writer.fresh(f"{what}s"), writer.handles[buffer.name]
                writer(f"int64_t* {read}; aoti_torch_get_{what}s({handle}, &{read});")
            for d, extent in missing:
                if extent.name not in known:
                    known.add(extent.name)
                    writer(f"const int64_t {extent.name} = {read}[{d}];")


def _launch(writer: HostWriter, group: Group, launch: Launchable, index: int, follows: bool) -> None:
    if launch.kernel.language == "triton":
        launch_cuda(writer, group, launch, index, follows)
        return
    given = [writer.pointer(name) + f" + {at}" * (at > 0) for name, at in zip(launch.params, launch.starts)]
    given += [f"(int64_t){c_expr(size)}" for size in launch.sizes]
    given += launch.numbers
    if launch.may_fail:
        bad = writer.fresh("bad")
        writer(f"int32_t {bad} = 0;")
        given.append(f"&{bad}")
    where = f"    // {group.nests[-1].loc}" if group.nests[-1].loc else ""
    writer(f"run_kernel({', '.join([str(index), *given])});    // {launch.kernel.name}{where}")
    if launch.may_fail:
        writer(f'TRY("index out of range in {group.name}", {bad})')


def _last_reads(plan: Plan) -> dict[int, list[str]]:
    """Step -> buffers that are used there for the last time, and whose memory nobody takes over."""
    kept = plan.schedule.loops.returned | {place.of for _, place in plan.places if place.kind == "reuse"}
    holders = {place.of: name for name, place in plan.places if place.kind == "block"}
    kept |= {name for name, place in plan.places if place.kind == "block" and holders[place.of] != name}
    found: dict[int, list[str]] = {}
    for name, k in plan.schedule.last_uses().items():
        if name not in kept:
            found.setdefault(k, []).append(name)
    return found


def _free(writer: HostWriter, k: int, last: dict[int, list[str]]) -> None:
    for name in last.get(k, ()):
        place = writer.places.get(name)
        if place is None:
            continue
        writer.forget_views(name)
        if place.kind == "block" and place.of in writer.handles:
            writer(f"{writer.handles[place.of]}.block.drop();")
        elif place.kind in ("extern", "output") and name in writer.handles:
            writer(f"{writer.handles[name]}.drop();")
        elif place.kind == "input" and writer.handles.get(name, "").startswith("inputs["):
            position = writer.handles[name].removeprefix("inputs[").removesuffix("]")
            writer(f"python->drop(python, inputs, {position});")


def _return(writer: HostWriter) -> tuple[tuple[Result, ...], int]:
    results: list[Result] = []
    count = 0
    for out in writer.plan.schedule.loops.outputs:
        if isinstance(out, BufferRef):
            results.append(Result("tensor", count))
            handle = writer.view(out)
            writer(f'TRY("{out.buffer}", aoti_torch_new_tensor_handle({handle}, &outputs[{count}]))')
            count += 1
        else:
            results.append(Result("expr" if isinstance(out, Expr) else "const", out))
    return tuple(results), count


# -- launches on a GPU -----------------------------------------------------------------------------


CUDA_HEAD: Final = """\
struct Launch { int32_t x, y, warps, shared; };
// The driver's CUlaunchAttribute and CUlaunchConfig.
struct Attribute { int32_t id, unused; union { int32_t number; char bytes[64]; }; };
struct Config {
    uint32_t grid[3], block[3], shared;
    void* stream;
    const Attribute* attributes;
    uint32_t count;
};
extern "C" {
Launch dv_launches[%(kernels)s];
int (*dv_launch_kernel)(const Config*, void*, void**, void**);
int (*dv_use_context)(void*);
void* dv_context;
int32_t dv_overlaps;
int32_t aoti_torch_get_current_cuda_stream(int32_t, void**);
int32_t aoti_torch_create_cuda_guard(int32_t, void**);
int32_t aoti_torch_delete_cuda_guard(void*);
}
// Kernels are launched on the device that is current, whichever the user's is.
struct OnDevice {
    void* guard = nullptr;
    OnDevice(int32_t index) { aoti_torch_create_cuda_guard(index, &guard); }
    ~OnDevice() { if (guard) aoti_torch_delete_cuda_guard(guard); }
};
// Temporaries of one call, from torch's allocator, which knows about streams.
struct DeviceTemporaries {
    Tensor block;
    char* start = nullptr;
    bool missing = false;
    DeviceTemporaries(int64_t bytes, int32_t kind, int32_t index) {
        const int64_t size[] = {bytes}, stride[] = {1};
        if (bytes <= 0) return;
        missing = aoti_torch_empty_strided(1, size, stride, 0, kind, index, &block.handle);
        if (!missing) start = (char*)data_of(block);
    }
};
// A tensor of the same layout on the device; used for inputs that kernels cannot read where they are.
static Handle moved(Handle h, Tensor& copy, int64_t n, const int64_t* sizes, const int64_t* strides,
                    int32_t dtype, int32_t kind, int32_t index, bool always) {
    if (!always && (uint64_t)data_of(h) % 16 == 0) return h;
    if (aoti_torch_empty_strided(n, sizes, strides, dtype, kind, index, &copy.handle)) return h;
    aoti_torch_copy_(copy, h, 0);
    return copy.handle;
}
// `follows`: one of our kernels comes right before, or this is the first, which waits before it reads. It may
// get ready while the one before finishes (programmatic stream serialization).
static const Attribute OVERLAP = {6, 0, {1}};
static const int32_t NO_CONTEXT = 201;  // in a thread that has not used the GPU before
static inline int32_t launch(void* kernel, const Launch& how, int64_t x, int64_t y, bool follows,
                             void* stream, void** args) {
    const int64_t gx = (x + how.x - 1) / how.x, gy = (y + how.y - 1) / how.y;
    if (gx <= 0 || gy <= 0) return 0;
    const Config config = {{(uint32_t)gx, (uint32_t)gy, 1}, {32u * how.warps, 1, 1}, (uint32_t)how.shared,
                           stream, &OVERLAP, follows ? dv_overlaps : 0u};
    const int32_t code = dv_launch_kernel(&config, kernel, args, nullptr);
    if (code != NO_CONTEXT || dv_use_context(dv_context)) return code;
    return dv_launch_kernel(&config, kernel, args, nullptr);
}
"""


def launch_cuda(writer: HostWriter, group: Group, made: Launchable, index: int, follows: bool) -> None:
    """launch(dv_kernels[0], dv_launches[0], rows, 1, false, stream, {&x, &o}): `dv_launches` holds each
    kernel's block sizes, warps and shared memory; the loader fills it in after tuning. Kernels assume
    pointers aligned to 16 bytes: an input that is not, or that lies on the CPU, is copied first; of a
    single number on the CPU they are given the value. `follows`: the step before was a kernel, too."""
    device = writer.plan.schedule.loops.device
    if "stream" not in writer.pointers:
        writer.pointers["stream"] = "stream"
        writer("void* stream = nullptr;")
        writer(f'TRY("stream", aoti_torch_get_current_cuda_stream({device.index or 0}, &stream))')
    args: list[str] = []
    for name, kind in zip(made.params, made.kernel.signature):
        pointer = _device_pointer(writer, name) if kind.startswith("*") else ""
        args.append(f"&{pointer}" if pointer else f"data_of({writer.handles[name]})")
    kinds = [{"i64": "int64_t", "i32": "int32_t"}.get(kind, "double") for kind in made.kernel.signature]
    for kind, text in zip(kinds[len(made.params) :], (*map(c_expr, made.sizes), *made.numbers)):
        local = writer.fresh("number")
        writer(f"{kind} {local} = {text};")
        args.append(f"&{local}")
    packed = writer.fresh("args")
    if "scratch" not in writer.pointers:
        writer.pointers["scratch"] = "scratch"
        writer("void* scratch = nullptr;")
    writer(f"void* {packed}[] = {{{', '.join([*args, '&scratch', '&scratch'])}}};")
    first, second = [*(c_expr(size) for size, _ in made.grid), "1"][:2]
    where = f"    // {group.nests[-1].loc}" if group.nests[-1].loc else ""
    where_to = f"{first}, {second}, {str(follows).lower()}, stream, {packed}"
    call = f"launch(dv_kernels[{index}], dv_launches[{index}], {where_to})"
    writer(f'TRY("launch of {made.kernel.name}", {call}){where}')


def _device_pointer(writer: HostWriter, name: str) -> str:
    """A pointer that the kernel may read; inputs, and what the CPU has made, are checked once per program."""
    type, is_input = writer.buffers[name].type, writer.buffers[name].kind == "input"
    from_cpu, seen = type.device.kind == "cpu", f"{name} on the device"
    if seen in writer.pointers:
        return writer.pointers[seen]
    if not from_cpu and (not is_input or name in writer.written):
        return writer.pointer(name)
    device = writer.plan.schedule.loops.device
    copy = writer.fresh("copy")
    writer(f"Tensor {copy};")
    target = f"{TORCH_CODE[type.dtype]}, 1, {device.index or 0}, {int(from_cpu)}"
    call = f"moved({writer.handles[name]}, {copy}, {writer.extents(type)}, {target})"
    found = writer.fresh("seen")
    writer(f"Handle {found} = {call};")
    text = writer.pointers[seen] = writer.fresh("p")
    writer(f"void* {text} = data_of({found});")
    return text


# -- library calls: straight into the C shim where it has the function, through the dispatcher's C entry
# where that can carry the values, else through Python


def emit_extern(writer: HostWriter, extern: Extern) -> None:
    """aten.mm.default(a, b) into o     aoti_torch_cpu_mm_out(o, a, b)
    aten.topk.default(x, 5)          uint64_t stack1[] = {own(x), 5, ...}; dispatch(..., "aten::topk", stack1)
    aten.sort.default(x, -1, False)  python->call_with(python, 0, {x}, ...)"""
    where = f"    // {extern.loc}" if extern.loc else ""
    writer(f"// {extern}{where}")
    if not DIRECT.get(extern.op, call_dispatcher)(writer, extern):
        call_python(writer, extern)


def shim(writer: HostWriter) -> str:
    """The part of the C shim for this program's device."""
    return writer.plan.schedule.loops.device.kind


# -- straight calls --------------------------------------------------------------------------------


def _into(function: str, writer: HostWriter, extern: Extern) -> bool:
    """An out= variant on tensors only."""
    if not extern.into or not all(isinstance(arg, BufferRef) for arg in extern.args):
        return False
    given = dict(extern.kwargs)
    factors = [given.get(name, 1) for name in ("beta", "alpha")] if "add" in function else []
    numbers = [repr(float(factor)) for factor in factors if isinstance(factor, (int, float))]
    if len(numbers) != len(factors):
        return False
    args = [writer.view(arg) for arg in extern.args if isinstance(arg, BufferRef)]
    out = writer.handle(extern.outputs[0])
    call = f"aoti_torch_{shim(writer)}_{function}_out({', '.join([out, *args, *numbers])})"
    writer(f'TRY_OP("{extern.op}", {call})')
    return True


def _convolution(writer: HostWriter, extern: Extern) -> bool:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = extern.args
    if not isinstance(x, BufferRef) or not isinstance(weight, BufferRef):
        return False
    bias_text = "nullptr"
    if isinstance(bias, BufferRef):
        bias_text = writer.fresh("bias")
        writer(f"Handle {bias_text}_ = {writer.view(bias)};")
        bias_text = f"&{bias_text}_"
    given = (stride, padding, dilation, output_padding)
    lists = [f"{writer.sizes(v)}, {len(v)}" for v in given if isinstance(v, tuple)]  # type: ignore[arg-type]
    a, b = writer.view(x), writer.view(weight)
    out = f"h_{extern.outputs[0]}"
    writer(f"Tensor {out};")
    flags = f"{lists[0]}, {lists[1]}, {lists[2]}, {int(bool(transposed))}, {lists[3]}, {groups}"
    call = f"aoti_torch_{shim(writer)}_convolution({a}, {b}, {bias_text}, {flags}, &{out}.handle)"
    writer(f'TRY_OP("{extern.op}", {call})')
    writer.settle(extern.outputs[0], out)
    return True


DIRECT: Final[dict[str, Callable[[HostWriter, Extern], bool]]] = {
    # What backward needs (the last result) is made only in grad mode: see util/library.py.
    "aten.mkldnn_rnn_layer.default": lambda writer, extern: (
        extern.results[-1] not in writer.read and call_dispatcher(writer, extern)),
    **{f"aten.{name}.default": partial(_into, name) for name in ("mm", "bmm", "addmm", "baddbmm")},
    "aten.convolution.default": _convolution,
    **{f"aten.{name}.default": lambda writer, extern: False  # see MEANT there
       for name in ("as_strided_scatter", "linalg_lu_solve")},
}  # fmt: skip


# -- through the dispatcher's C entry: any op whose arguments libtorch's shim can carry ------------

DISPATCH_HEAD: Final = """\
extern "C" {
int32_t torch_new_list_reserve_size(uint64_t, void**);
int32_t torch_list_push_back(void*, uint64_t);
int32_t torch_new_string_handle(const char*, uint64_t, void**);
}
static inline uint64_t own(Handle h) {
    Handle copy = nullptr;
    aoti_torch_new_tensor_handle(h, &copy);
    return (uint64_t)copy;
}
static inline uint64_t some(uint64_t value) {
    uint64_t* p = (uint64_t*)malloc(8);  // libtorch deletes it
    *p = value;
    return (uint64_t)p;
}
template <class... T> static uint64_t list(T... items) {
    void* made = nullptr;
    torch_new_list_reserve_size(sizeof...(items), &made);
    (torch_list_push_back(made, (uint64_t)items), ...);
    return (uint64_t)made;
}
static inline uint64_t text(const char* s, uint64_t n) {
    void* made = nullptr;
    torch_new_string_handle(s, n, &made);
    return (uint64_t)made;
}
static int32_t dispatch(Python* python, const char* op, const char* overload, uint64_t* stack) {
    TRY_OP(op, aoti_torch_call_dispatcher(op, overload, stack))
    return 0;
}
"""


class NotCarried(Exception):
    """The shim has no form for this value."""


def encode(writer: HostWriter, arg: ExternArg, kind: str) -> str:
    """The text of a 64-bit value: an owned tensor handle, a number, or a pointer to a list, a string or a
    present optional. Views that it needs go to the writer."""
    if kind.startswith("Optional["):
        return "0" if arg is None else f"some({encode(writer, arg, kind[9:-1])})"
    if kind.startswith("List[") and isinstance(arg, (tuple, list)):  # the schema has its defaults as lists
        return f"list({', '.join(encode(writer, item, kind[5:-1]) for item in arg)})"
    if kind == "Tensor" and isinstance(arg, BufferRef):
        return f"own({writer.view(arg)})"
    if kind == "int" and isinstance(arg, Expr):
        return f"(uint64_t)({c_expr(arg)})"
    if kind == "int" and type(arg) is int:
        return f"(uint64_t){arg}l"
    if kind == "float" and isinstance(arg, Scalar):
        return f"(uint64_t)bits_of({arg.args[0]})"
    if kind == "float" and type(arg) in (int, float):
        bits = struct.unpack("Q", struct.pack("d", float(arg)))[0]  # type: ignore[arg-type]
        return f"{bits}ul /* {arg} */"
    if kind == "bool" and type(arg) is bool:
        return str(int(arg))
    if kind == "str" and isinstance(arg, str) and not arg.startswith("torch."):
        return f"text({json.dumps(arg)}, {len(arg.encode())})"
    raise NotCarried(kind)


def call_dispatcher(writer: HostWriter, extern: Extern) -> bool:
    """Emit the call if all its values can be carried."""
    schema = find_op(extern.op)._schema
    if extern.into or not schema.returns or schema.name in OPDEFS:
        return False  # through Python, which keeps the class of what a check or a custom op raises
    is_partial = len(schema.returns) != len(extern.results) and not extern.positions
    if is_partial or any(str(result.type) != "Tensor" for result in schema.returns):
        return False
    given = dict(extern.kwargs)
    try:
        values = []
        for k, argument in enumerate(schema.arguments):
            arg = extern.args[k] if k < len(extern.args) else given.get(argument.name, argument.default_value)
            values.append(encode(writer, arg, str(argument.type)))
    except NotCarried:
        return False
    _emit(writer, extern, values, len(schema.returns))
    return True


def _emit(writer: HostWriter, extern: Extern, values: list[str], results: int) -> None:
    stack = writer.fresh("stack")
    namespace, name, overload = extern.op.split(".")
    room = max(len(values), results)
    writer(f"uint64_t {stack}[{room}] = {{{', '.join(values)}}};")
    overload = "" if overload == "default" else overload
    writer(f'if (dispatch(python, "{namespace}::{name}", "{overload}", {stack})) return 1;')
    places = extern.positions or range(len(extern.results))
    for k, output in zip(places, extern.results):
        writer(f"Tensor h_{output}{{(Handle){stack}[{k}]}};")
    for k in sorted(set(range(results)) - set(places)):  # an undefined tensor, most often
        writer(f"Tensor {writer.fresh('unused')}{{(Handle){stack}[{k}]}};")
    for output in extern.results:
        writer.settle(output, f"h_{output}")


# -- through Python --------------------------------------------------------------------------------


def call_python(writer: HostWriter, extern: Extern) -> None:
    tensors: list[str] = []
    numbers: list[str] = []

    def slot(arg: ExternArg) -> object:
        if isinstance(arg, BufferRef):
            tensors.append(writer.view(arg))
            return Slot("tensor", len(tensors) - 1)
        if isinstance(arg, Expr) and not arg.is_const:
            numbers.append(c_expr(arg))
            return Slot("int", len(numbers) - 1)
        if isinstance(arg, Expr):
            return arg.value
        if isinstance(arg, Scalar):
            numbers.append(f"bits_of({arg.args[0]})")
            return Slot("float", len(numbers) - 1)
        if isinstance(arg, tuple):
            return tuple(slot(item) for item in arg)
        return arg

    args = tuple(slot(arg) for arg in extern.args)
    kwargs = tuple((key, slot(arg)) for key, arg in extern.kwargs)
    index, count = len(writer.python_calls), len(extern.results)
    called = PythonCall(extern.op, args, kwargs, len(tensors), count, extern.positions)
    writer.python_calls.append(called)
    given, ints, got = (writer.fresh(stem) for stem in ("in", "number", "out"))
    writer(f"Handle {given}[] = {{{', '.join(tensors) or 'nullptr'}}};")
    writer(f"const int64_t {ints}[] = {{{', '.join(numbers) or '0'}}};")
    writer(f"Handle {got}[{max(count, 1)}] = {{}};")
    takes = f"{given}, {len(tensors)}, {ints}, {len(numbers)}, {got}, {count}"
    writer(f"if (python->call_with(python, {index}, {takes})) return 1;")
    for k, name in enumerate(extern.results):
        owned = writer.fresh("made") if extern.into else f"h_{name}"
        writer(f"Tensor {owned}{{{got}[{k}]}};")
        if extern.into:
            writer(f'TRY("{extern.op}", aoti_torch_copy_({writer.handle(name)}, {owned}, 0))')
        else:
            writer.settle(name, owned)
