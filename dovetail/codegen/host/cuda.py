"""What a host program needs on a GPU: device memory, and kernels launched through the driver.

    launch(dv_kernels[0], dv_launches[0], rows, 1, false, stream, {&x, &o});

`dv_launches` holds each kernel's block sizes, warps and shared memory; the loader fills it in after
tuning. Kernels assume pointers aligned to 16 bytes: an input that is not, or that lies on the CPU, is
copied first; of a single number on the CPU (a 0-d tensor among GPU ones) they are given the value.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dovetail.codegen.cpp.exprs import c_expr
from dovetail.codegen.host.prelude import TORCH_CODE
from dovetail.codegen.target import Launchable
from dovetail.ir.schedule import Group

if TYPE_CHECKING:
    from dovetail.codegen.host.program import HostWriter

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
    void* start = nullptr;
    bool missing = false;
    DeviceTemporaries(int64_t bytes, int32_t kind, int32_t index) {
        const int64_t size[] = {bytes}, stride[] = {1};
        if (bytes <= 0) return;
        missing = aoti_torch_empty_strided(1, size, stride, 0, kind, index, &block.handle);
        if (!missing) start = block.data();
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
// `follows`: one of our kernels comes right before, and this one may get ready while that one finishes
// (programmatic stream serialization); it waits by itself.
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
    """`follows`: the step before was a kernel, too."""
    device = writer.plan.schedule.loops.device
    if "stream" not in writer.pointers:
        writer.pointers["stream"] = "stream"
        writer("void* stream = nullptr;")
        writer(f'TRY("stream", aoti_torch_get_current_cuda_stream({device.index or 0}, &stream))')
    args: list[str] = []
    for name, kind in zip(made.params, made.kernel.signature):
        pointer = _device_pointer(writer, name) if kind.startswith("*") else ""
        args.append(f"&{pointer}" if pointer else f"data_of({writer.handles[name]})")
    for expr, kind in zip(made.sizes, made.kernel.signature[len(made.params) :]):
        local = writer.fresh("size")
        writer(f"{'int64_t' if kind == 'i64' else 'int32_t'} {local} = {c_expr(expr)};")
        args.append(f"&{local}")
    for name in made.numbers:
        local = writer.fresh("number")
        writer(f"double {local} = {name};")
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
