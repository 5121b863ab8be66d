/* Torch's global state: each value is read by a function of libtorch, called with one integer and
 * answering with an integer, or by a Python callable where libtorch has none to offer.
 *
 *     ("grad_mode", True, torch.is_grad_enabled, address, 0, 1, 1)      name, value, callable,
 *                                                                      address, argument, width, number
 */
#include "native.h"

typedef struct {
    PyObject *name, *value, *callable;
    intptr_t (*function)(intptr_t argument);
    intptr_t argument;
    int width; /* bytes of the answer that count */
    long long expected;
} Read;

struct State {
    Py_ssize_t count;
    Read reads[];
};

State *make_state(PyObject *reads) {
    Py_ssize_t count = PyTuple_Check(reads) ? PyTuple_GET_SIZE(reads) : 0;
    State *state = PyMem_Calloc(1, sizeof *state + count * sizeof(Read));
    if (!state) return (State *)PyErr_NoMemory();
    for (; state->count < count; state->count++) {
        Read *read = &state->reads[state->count];
        long long address, argument;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(reads, state->count), "UOOLLiL", &read->name, &read->value,
                              &read->callable, &address, &argument, &read->width, &read->expected)) {
            PyMem_Free(state);
            return NULL;
        }
        read->function = (intptr_t (*)(intptr_t))(intptr_t)address;
        read->argument = (intptr_t)argument;
    }
    return state;
}

static int ask_function(const Read *read) {
    uint64_t answer = (uint64_t)read->function(read->argument);
    uint64_t mask = read->width >= 8 ? ~0ull : (1ull << 8 * read->width) - 1;
    return (answer & mask) == ((uint64_t)read->expected & mask);
}

static int ask_python(const Read *read) {
    PyObject *got = PyObject_CallNoArgs(read->callable);
    int same = !got ? -1 : got == read->value ? 1 : PyObject_RichCompareBool(got, read->value, Py_EQ);
    Py_XDECREF(got);
    return same;
}

int check_state(const State *state, PyObject **why) {
    for (Py_ssize_t i = 0; i < state->count; i++) {
        const Read *read = &state->reads[i];
        int same = read->function ? ask_function(read) : ask_python(read);
        if (same > 0) continue;
        if (same == 0 && why)
            *why = PyUnicode_FromFormat("global state: %U is no longer %.100R", read->name, read->value);
        return same;
    }
    return 1;
}
