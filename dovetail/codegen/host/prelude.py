"""The C++ every host program stands on: libtorch's C shim, declared by hand, and owned handles.

A host program is `extern "C" int32_t run(inputs, ints, floats, outputs, python)`: see csrc/launch.c for
who calls it. `dv_kernels` and `dv_arena` are filled in by the loader.
"""
from __future__ import annotations

from typing import Final

from dovetail.codegen.cpp.prelude import HEAD as KERNEL_HEAD
from dovetail.ir import types
from dovetail.ir.types import DType

TORCH_CODE: Final[dict[DType, int]] = {
    types.U8: 0, types.I8: 1, types.I16: 2, types.I32: 3, types.I64: 4, types.F16: 5, types.F32: 6,
    types.F64: 7, types.C32: 8, types.C64: 9, types.C128: 10, types.BOOL: 11, types.BF16: 15,
    types.F8E5M2: 23, types.F8E4M3: 24, types.U16: 27, types.U32: 28, types.U64: 29,
}  # fmt: skip
"""c10::ScalarType, part of libtorch's stable ABI."""

DEVICE_CODE: Final = {"cpu": 0, "cuda": 1}
"""c10::DeviceType, likewise."""

HEAD: Final = KERNEL_HEAD + """\
typedef void* Handle;
extern "C" {
int32_t aoti_torch_delete_tensor_object(Handle);
int32_t aoti_torch_get_data_ptr(Handle, void**);
int32_t aoti_torch_get_sizes(Handle, int64_t**);
int32_t aoti_torch_get_strides(Handle, int64_t**);
int32_t aoti_torch_new_tensor_handle(Handle, Handle*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Handle*);
int32_t aoti_torch__reinterpret_tensor(Handle, int64_t, const int64_t*, const int64_t*, int64_t, Handle*);
int32_t aoti_torch_create_tensor_from_blob(void*, int64_t, const int64_t*, const int64_t*, int64_t, int32_t,
                                           int32_t, int32_t, Handle*);
int32_t aoti_torch_copy_(Handle, Handle, int32_t);
int32_t aoti_torch_%(device)s_mm_out(Handle, Handle, Handle);
int32_t aoti_torch_%(device)s_bmm_out(Handle, Handle, Handle);
int32_t aoti_torch_%(device)s_addmm_out(Handle, Handle, Handle, Handle, double, double);
int32_t aoti_torch_%(device)s_baddbmm_out(Handle, Handle, Handle, Handle, double, double);
int32_t aoti_torch_%(device)s_convolution(Handle, Handle, Handle*, const int64_t*, int64_t, const int64_t*,
    int64_t, const int64_t*, int64_t, int32_t, const int64_t*, int64_t, int64_t, Handle*);
int32_t aoti_torch_call_dispatcher(const char*, const char*, uint64_t*);
__attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
bool aoti_torch_grad_mode_is_enabled();
void aoti_torch_grad_mode_set_enabled(bool);
void* malloc(unsigned long);
}
struct Python {
    int32_t (*call_with)(Python*, int32_t, void**, int32_t, const int64_t*, int32_t, void**, int32_t);
    void (*fail)(Python*, const char*);
    void (*drop)(Python*, void**, int32_t);
};
struct Arena { void* (*take)(int64_t); void (*give)(void*); };
extern "C" { void* dv_kernels[%(kernels)s]; Arena dv_arena; }
template <class... A> void run_kernel(int k, A... args) { ((void (*)(A...))dv_kernels[k])(args...); }

static inline int64_t bits_of(double x) { return __builtin_bit_cast(int64_t, x); }

// A tensor this program owns.
struct Tensor {
    Handle handle = nullptr;
    ~Tensor() { drop(); }
    void drop() { if (handle) aoti_torch_delete_tensor_object(handle); handle = nullptr; }
    operator Handle() const { return handle; }
};
// Temporaries of one call.
struct Temporaries {
    char* start;
    bool missing;
    explicit Temporaries(int64_t bytes)
        : start(bytes > 0 ? (char*)dv_arena.take(bytes) : nullptr), missing(bytes > 0 && !start) {
        const int64_t one = 1;
        Tensor never;  // whose failure says how much was asked for
        if (missing) aoti_torch_empty_strided(1, &bytes, &one, 0, 0, 0, &never.handle);
    }
    ~Temporaries() { if (start) dv_arena.give(start); }
};
struct NoGrad {
    bool was = aoti_torch_grad_mode_is_enabled();
    NoGrad() { if (was) aoti_torch_grad_mode_set_enabled(false); }
    ~NoGrad() { if (was) aoti_torch_grad_mode_set_enabled(true); }
};
static inline void* data_of(Handle h) { void* p = nullptr; aoti_torch_get_data_ptr(h, &p); return p; }
// A library result with other strides than the kernels were compiled for is copied into those.
static int32_t settle(Tensor& t, int64_t n, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                      int32_t kind, int32_t index) {
    int64_t *z = nullptr, *s = nullptr;
    if (aoti_torch_get_sizes(t, &z) || aoti_torch_get_strides(t, &s)) return 1;
    bool same = true;
    for (int64_t d = 0; d < n; ++d) {
        if (z[d] != sizes[d]) return 1;
        same &= s[d] == strides[d] || sizes[d] <= 1;
    }
    if (same) return 0;
    Tensor copy;
    if (aoti_torch_empty_strided(n, sizes, strides, dtype, kind, index, &copy.handle)) return 1;
    if (aoti_torch_copy_(copy, t, 0)) return 1;
    Handle h = t.handle; t.handle = copy.handle; copy.handle = h;
    return 0;
}
#define WINDOW(t, p, n, z, s, ...) aoti_torch_create_tensor_from_blob(p, n, z, s, 0, __VA_ARGS__, &t.handle)
#define VIEW(t, whole, ...) aoti_torch__reinterpret_tensor(whole, __VA_ARGS__, &t.handle)
#define TRY(what, call) if (call) { python->fail(python, what); return 1; }
// An op that fails says why, in a libtorch that hands on what it says.
#define TRY_OP(op, call) TRY(torch_exception_get_what_without_backtrace \\
    ? torch_exception_get_what_without_backtrace() : op, call)
"""
