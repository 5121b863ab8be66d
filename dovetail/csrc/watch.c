/* Whether tensors are still what they were: where their memory is, their version, samples of their bytes.
 *
 *     tensor_states(inputs, spec) -> bytes, four words per watched tensor
 *
 * PyTorch's version counter misses writes through `.data` or NumPy; a small tensor is therefore read as a
 * whole, a large one at SAMPLES places, which sees every update of a whole tensor. Python finds the
 * places below by looking at tensors whose state it knows (runtime/frozen.py). */
#include "native.h"

enum { WHOLE = 512, SAMPLES = 16 };

/* Offsets: in TensorImpl, but `count` in the version counter and `memory` in StorageImpl. */
static struct {
    Py_ssize_t storage, offset, version, count, memory;
} places;

typedef struct {
    int64_t position, bytes, item; /* bytes is 0 where the memory is not to be read */
} Watched;

typedef struct {
    uint64_t storage, offset, version, samples;
} Found;

PyObject *attach_watch(PyObject *Py_UNUSED(module), PyObject *args) {
    if (!PyArg_ParseTuple(args, "nnnnn:attach_watch", &places.storage, &places.offset, &places.version,
                          &places.count, &places.memory))
        return NULL;
    Py_RETURN_NONE;
}

static uint64_t mix(uint64_t sum, uint64_t word) {
    sum = (sum ^ word) * 0x9e3779b97f4a7c15u;
    return sum ^ (sum >> 29);
}

static uint64_t sample(const char *start, int64_t bytes) {
    uint64_t sum = (uint64_t)bytes;
    if (bytes < 8) {
        uint64_t word = 0;
        memcpy(&word, start, (size_t)bytes);
        return mix(sum, word);
    }
    int64_t count = bytes <= WHOLE ? bytes / 8 : SAMPLES;
    int64_t last = bytes - 8;
    for (int64_t i = 0; i < count; i++) sum = mix(sum, read_word(start + (count > 1 ? last * i / (count - 1) : 0)));
    return bytes <= WHOLE ? mix(sum, read_word(start + last)) : sum;
}

static Found find(PyObject *tensor, const Watched *watched) {
    const char *impl = *(const char **)tensor_handle(tensor);
    const char *storage = *(const char **)(impl + places.storage);
    const char *counter = *(const char **)(impl + places.version);
    Found found = {(uint64_t)(uintptr_t)storage, read_word(impl + places.offset), 0, 0};
    if (counter) found.version = *(const uint32_t *)(counter + places.count);
    const char *memory = storage ? *(const char **)(storage + places.memory) : NULL;
    if (memory && watched->bytes) found.samples = sample(memory + found.offset * watched->item, watched->bytes);
    return found;
}

PyObject *tensor_states(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *inputs;
    const char *spec;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "O!y#:tensor_states", &PyTuple_Type, &inputs, &spec, &length)) return NULL;
    Py_ssize_t count = length / (Py_ssize_t)sizeof(Watched);
    PyObject *result = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(Found));
    if (!result) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Watched watched;
        memcpy(&watched, spec + i * (Py_ssize_t)sizeof watched, sizeof watched);
        PyObject *tensor =
            watched.position < PyTuple_GET_SIZE(inputs) ? PyTuple_GET_ITEM(inputs, watched.position) : NULL;
        if (!places.version || !tensor || !is_tensor(tensor)) {
            Py_DECREF(result);
            return PyErr_Format(PyExc_TypeError, "input %lld is no tensor to watch", watched.position);
        }
        Found found = find(tensor, &watched);
        memcpy(PyBytes_AS_STRING(result) + i * (Py_ssize_t)sizeof found, &found, sizeof found);
    }
    return result;
}
