/* A tensor's metadata, read where it lies. Python finds the layout of this build of torch by looking at
 * tensors whose metadata it knows (runtime/torch_abi.py), checks it on many more, and hands it in:
 *
 *     object + impl -> TensorImpl: keys, dtype, device, [ndim, 5 sizes, 5 strides] or [ndim, pointer], meta
 *     meta -> autograd's record: a virtual function says requires_grad; flag and grad_fn are what a leaf's
 *             answer depends on
 */
#include "native.h"

enum { INLINE_DIMS = 5 };

static struct {
    int attached;
    Py_ssize_t impl, keys, dtype, device, extents, meta, flag, grad_fn;
    const void *leaf_vtable;
    PyTypeObject *base;
    PyObject *(*wrap)(const void *handle);
    int (*delete_handle)(void *handle);
    int (*new_handle)(void *original, void **made);
} torch;

PyObject *attach_torch(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *base;
    long long vtable, wrap, delete_handle, new_handle;
    if (!PyArg_ParseTuple(args, "O!nnnnnnnnLLLL:attach_torch", &PyType_Type, &base, &torch.impl, &torch.keys,
                          &torch.dtype, &torch.device, &torch.extents, &torch.meta, &torch.flag,
                          &torch.grad_fn, &vtable, &wrap, &delete_handle, &new_handle))
        return NULL;
    torch.leaf_vtable = (const void *)(intptr_t)vtable;
    torch.wrap = (PyObject * (*)(const void *))(intptr_t)wrap;
    torch.delete_handle = (int (*)(void *))(intptr_t)delete_handle;
    torch.new_handle = (int (*)(void *, void **))(intptr_t)new_handle;
    torch.base = (PyTypeObject *)Py_NewRef(base);
    torch.attached = 1;
    Py_RETURN_NONE;
}

int is_tensor(PyObject *object) { return torch.attached && PyObject_TypeCheck(object, torch.base); }

static inline const char *impl_of(PyObject *tensor) {
    return *(const char **)((char *)tensor + torch.impl);
}
static inline const void *meta_of(const char *impl) { return *(const void **)(impl + torch.meta); }

void *tensor_handle(PyObject *tensor) { return (char *)tensor + torch.impl; }

static int requires_grad(const char *impl) {
    const void *meta = meta_of(impl);
    if (!meta) return 0;
    typedef _Bool (*Method)(const void *self);
    return (*(Method **)meta)[1](meta); /* the second virtual function of AutogradMetaInterface */
}

static inline Py_ssize_t dims_of(const char *impl) { return *(const Py_ssize_t *)(impl + torch.extents); }

static const int64_t *extents_of(const char *impl, int which) {
    const int64_t *inline_values = (const int64_t *)(impl + torch.extents) + 1;
    Py_ssize_t ndim = dims_of(impl);
    if (ndim <= INLINE_DIMS) return inline_values + which * INLINE_DIMS;
    return *(const int64_t *const *)inline_values + which * ndim;
}

int tensor_extent(PyObject *tensor, int which, Py_ssize_t dim, int64_t *value) {
    const char *impl = impl_of(tensor);
    if (dim < 0) dim += dims_of(impl);
    if (dim < 0 || dim >= dims_of(impl)) return 0;
    *value = extents_of(impl, which)[dim];
    return 1;
}

/* Whether a tensor has these sizes and strides, and the dispatch keys of a plain one: it is not sparse, batched, of a
 * subclass, nor conjugated or negated when it is read. */
PyObject *lies_as(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(args[2]) || !is_tensor(args[0]) || !is_tensor(args[1])) Py_RETURN_FALSE;
    const char *impl = impl_of(args[0]), *plain = impl_of(args[1]);
    Py_ssize_t ndim = dims_of(impl), given = PyTuple_GET_SIZE(args[2]);
    int same = read_word(impl + torch.keys) == read_word(plain + torch.keys) && given == 2 * ndim;
    for (Py_ssize_t i = 0; same && i < given; i++)
        same = extents_of(impl, i >= ndim)[i % ndim] == PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], i));
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

/* -- the check */

static int read_extents(PyObject *tuple, int64_t *into) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        into[i] = item == Py_None ? ANY : PyLong_AsLongLong(item);
        if (into[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

TensorSpec *make_tensor_spec(PyObject *type, PyObject *tuple) {
    PyObject *shape, *stride;
    long long dtype, kind, index, grad;
    unsigned long long keys;
    if (!torch.attached)
        return (TensorSpec *)PyErr_Format(PyExc_RuntimeError, "attach_torch was not called");
    if (!PyArg_ParseTuple(tuple, "LLLLO!O!K", &dtype, &kind, &index, &grad, &PyTuple_Type, &shape,
                          &PyTuple_Type, &stride, &keys))
        return NULL;
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    if (PyTuple_GET_SIZE(stride) != ndim)
        return (TensorSpec *)PyErr_Format(PyExc_ValueError, "shape and stride differ in length");
    TensorSpec *spec = PyMem_Malloc(sizeof *spec + 2 * ndim * sizeof(int64_t));
    if (!spec) return (TensorSpec *)PyErr_NoMemory();
    *spec = (TensorSpec){(PyTypeObject *)type, dtype, kind, index, grad, keys, ndim};
    if (read_extents(shape, spec->sizes_and_strides) < 0 ||
        read_extents(stride, spec->sizes_and_strides + ndim) < 0) {
        PyMem_Free(spec);
        return NULL;
    }
    return spec;
}

#define FAIL(...)                                                                                          \
    do {                                                                                                   \
        if (why) *why = PyUnicode_FromFormat(__VA_ARGS__);                                                 \
        return 0;                                                                                          \
    } while (0)
#define EXPECT(what, expected, got)                                                                        \
    if ((expected) != (got))                                                                               \
    FAIL("%S: expected " what " %lld, got %lld", path, (long long)(expected), (long long)(got))

int check_tensor(const TensorSpec *spec, PyObject *object, PyObject *path, PyObject **why) {
    if (Py_TYPE(object) != spec->type)
        FAIL("%S: expected a %s, got a %s", path, spec->type->tp_name, Py_TYPE(object)->tp_name);
    const char *impl = impl_of(object);
    if (!impl) FAIL("%S: a tensor without contents", path);
    const int8_t *device = (const int8_t *)(impl + torch.device);
    EXPECT("dtype number", spec->dtype, *(const uint16_t *)(impl + torch.dtype));
    EXPECT("device kind", spec->device_kind, device[0]);
    if (spec->device_index != ANY) EXPECT("device index", spec->device_index, device[1]);
    EXPECT("rank", spec->ndim, dims_of(impl));
    for (int which = 0; which < 2; which++)
        for (Py_ssize_t i = 0; i < spec->ndim; i++) {
            int64_t expected = spec->sizes_and_strides[which * spec->ndim + i];
            int64_t got = extents_of(impl, which)[i];
            if (expected != ANY && expected != got)
                FAIL("%S: expected %s %lld at dim %zd, got %lld", path, which ? "stride" : "size",
                     (long long)expected, i, (long long)got);
        }
    uint64_t keys = *(const uint64_t *)(impl + torch.keys);
    if (spec->dispatch && keys != spec->dispatch)
        FAIL("%S: expected other dispatch keys (inference mode, conjugation, a subclass)", path);
    if (requires_grad(impl) != spec->requires_grad)
        FAIL("%S: expected requires_grad=%s", path, spec->requires_grad ? "True" : "False");
    return 1;
}

static int extent_words(const TensorSpec *spec, const char *impl, Words *words) {
    if (spec->ndim > INLINE_DIMS && add_word(words, impl + torch.extents + 8, ~0ull) < 0) return -1;
    for (int which = 0; which < 2; which++)
        for (Py_ssize_t i = 0; i < spec->ndim; i++)
            if (spec->sizes_and_strides[which * spec->ndim + i] != ANY &&
                add_word(words, extents_of(impl, which) + i, ~0ull) < 0)
                return -1;
    return 0;
}

/* A set flag answers for requires_grad by itself. Without it, a leaf may get a grad_fn and a view asks
 * its base. */
static int grad_words(const char *impl, Words *words) {
    const char *meta = meta_of(impl);
    if (add_word(words, impl + torch.meta, ~0ull) < 0) return -1;
    if (!meta) return 1;
    if (!meta[torch.flag] && *(const void *const *)meta != torch.leaf_vtable) return 0;
    if (add_word(words, meta + torch.flag, 0xff) < 0) return -1;
    if (meta[torch.flag]) return 1;
    return add_word(words, meta, ~0ull) < 0 || add_word(words, meta + torch.grad_fn, ~0ull) < 0 ? -1 : 1;
}

int tensor_words(const TensorSpec *spec, PyObject *tensor, Words *words) {
    const char *impl = impl_of(tensor);
    int failed =
        add_word(words, &tensor->ob_type, ~0ull) < 0 || add_word(words, tensor_handle(tensor), ~0ull) < 0 ||
        add_word(words, impl + torch.extents, ~0ull) < 0 || extent_words(spec, impl, words) < 0 ||
        add_word(words, impl + torch.dtype, 0xffff) < 0 ||
        add_word(words, impl + torch.device, 0xffff) < 0 || add_word(words, impl + torch.keys, ~0ull) < 0;
    return failed ? -1 : grad_words(impl, words);
}

/* -- handles */

PyObject *wrap_borrowed(void *handle) { return torch.wrap(handle); }

PyObject *wrap_handle(void *handle) {
    PyObject *tensor = torch.wrap(handle);
    torch.delete_handle(handle);
    return tensor;
}

void delete_handle(void *handle) { torch.delete_handle(handle); }

void *copy_handle(PyObject *tensor) {
    void *made = NULL;
    if (!is_tensor(tensor)) return PyErr_Format(PyExc_TypeError, "expected a tensor, got %.100R", tensor);
    if (torch.new_handle(tensor_handle(tensor), &made))
        return PyErr_Format(PyExc_RuntimeError, "libtorch could not copy a tensor handle");
    return made;
}
