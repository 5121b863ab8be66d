/* Launch: a generated host program as a Python callable.
 *
 *     int32_t run(void **inputs, int64_t *ints, double *floats, void **outputs, void *python)
 *
 * Inputs are handles of libtorch's C shim, borrowed (by `consume`: given, so that the program can free an
 * input after its last use with `drop`); outputs are handles it gives away, or NULL for None.
 * `python` begins with the table of functions below: a program calls back through it for what the shim
 * cannot do. The GIL is free while the program runs. */
#include "native.h"
#include <string.h>

typedef struct Python Python;

/* What a host program finds at `python`. New members go at the end. */
struct Python {
    int32_t (*call_with)(Python *self, int32_t index, void **in, int32_t n_in, const int64_t *ints,
                         int32_t n_ints, void **out, int32_t n_out);
    void (*fail)(Python *self, const char *text);
    void (*drop)(Python *self, void **inputs, int32_t position);
    /* the rest is ours */
    PyObject *callables;
    PyThreadState *thread;
    int owns_inputs;
    char text[1024];
};

typedef int32_t (*Program)(void **inputs, int64_t *ints, double *floats, void **outputs, void *python);

typedef struct {
    PyObject_HEAD vectorcallfunc vectorcall;
    Program program;
    char *kinds; /* per input: t a tensor, i an int, f a float */
    Py_ssize_t n_inputs, n_outputs;
    PyObject *callables, *keep;
} Launch;

/* -- calls from the program to Python */

static PyObject *make_arguments(void **in, int32_t n_in, const int64_t *ints, int32_t n_ints) {
    PyObject *args = PyTuple_New(n_in + n_ints);
    for (int32_t i = 0; args && i < n_in + n_ints; i++) {
        PyObject *item = i < n_in ? wrap_borrowed(in[i]) : PyLong_FromLongLong(ints[i - n_in]);
        if (item) PyTuple_SET_ITEM(args, i, item);
        else Py_CLEAR(args);
    }
    return args;
}

static int take_results(PyObject *results, void **out, int32_t n_out) {
    PyObject *sequence =
        is_tensor(results) ? PyTuple_Pack(1, results) : PySequence_Fast(results, "expected tensors");
    if (!sequence) return -1;
    int failed = PySequence_Fast_GET_SIZE(sequence) != n_out;
    if (failed)
        PyErr_Format(PyExc_RuntimeError, "expected %d results, got %zd", n_out,
                     PySequence_Fast_GET_SIZE(sequence));
    for (int32_t i = 0; !failed && i < n_out; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(sequence, i);
        out[i] = item == Py_None ? NULL : copy_handle(item);
        failed = item != Py_None && !out[i];
    }
    Py_DECREF(sequence);
    return failed ? -1 : 0;
}

static int32_t call_with(Python *self, int32_t index, void **in, int32_t n_in, const int64_t *ints,
                         int32_t n_ints, void **out, int32_t n_out) {
    PyEval_RestoreThread(self->thread);
    PyObject *callable =
        index < PyTuple_GET_SIZE(self->callables) ? PyTuple_GET_ITEM(self->callables, index) : NULL;
    PyObject *args = NULL, *results = NULL;
    if (!callable)
        PyErr_Format(PyExc_IndexError, "the program calls Python function %d, which was not given", index);
    if (callable) args = make_arguments(in, n_in, ints, n_ints);
    if (args) results = PyObject_Call(callable, args, NULL);
    int failed = !results || take_results(results, out, n_out) < 0;
    Py_XDECREF(results);
    Py_XDECREF(args);
    self->thread = PyEval_SaveThread();
    return failed;
}

static void fail(Python *self, const char *text) { snprintf(self->text, sizeof self->text, "%s", text); }

/* After the last use of an input; it is freed here if the caller gave it away. */
static void drop(Python *self, void **inputs, int32_t position) {
    if (!self->owns_inputs || !inputs[position]) return;
    delete_handle(inputs[position]);
    inputs[position] = NULL;
}

/* -- calls from Python to the program */

enum { FEW = 32 };

typedef struct {
    void *few[4 * FEW], **all; /* four arrays, one behind the other */
    void **in, **out;
    int64_t *i;
    double *f;
} Buffers;

static int open_buffers(const Launch *self, Buffers *buffers) {
    Py_ssize_t most = self->n_inputs > self->n_outputs ? self->n_inputs : self->n_outputs;
    void **all = buffers->all = most > FEW ? PyMem_Malloc(4 * most * sizeof *all) : buffers->few;
    if (!all) return PyErr_NoMemory(), -1;
    buffers->in = all, buffers->out = all + most;
    buffers->i = (int64_t *)(all + 2 * most), buffers->f = (double *)(all + 3 * most);
    memset(buffers->out, 0, self->n_outputs * sizeof *buffers->out);
    return 0;
}

static int read_arguments(const Launch *self, PyObject *const *args, Buffers *buffers) {
    Py_ssize_t tensors = 0, ints = 0, floats = 0;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++) {
        if (self->kinds[i] == 't') {
            if (!is_tensor(args[i]))
                return PyErr_Format(PyExc_TypeError, "input %zd: expected a tensor, got %.100R", i,
                                    args[i]),
                       -1;
            buffers->in[tensors++] = tensor_handle(args[i]);
        } else if (self->kinds[i] == 'i') {
            int64_t value = buffers->i[ints++] = PyLong_AsLongLong(args[i]);
            if (value == -1 && PyErr_Occurred()) return -1;
        } else {
            double value = buffers->f[floats++] = PyFloat_AsDouble(args[i]);
            if (value == -1.0 && PyErr_Occurred()) return -1;
        }
    }
    return 0;
}

static PyObject *take_outputs(const Launch *self, void **out, int failed) {
    PyObject *list = failed ? NULL : PyList_New(self->n_outputs);
    for (Py_ssize_t i = 0; i < self->n_outputs; i++) {
        PyObject *tensor = out[i] ? wrap_handle(out[i]) : Py_NewRef(Py_None);
        if (list && tensor) PyList_SET_ITEM(list, i, tensor);
        else Py_XDECREF(tensor);
        if (!tensor) Py_CLEAR(list);
    }
    return list;
}

static PyObject *run_program(Launch *self, Buffers *buffers, int owns_inputs) {
    Python python = {call_with, fail, drop, self->callables, NULL, owns_inputs, ""};
    Py_INCREF(self);
    python.thread = PyEval_SaveThread();
    int32_t failed = self->program(buffers->in, buffers->i, buffers->f, buffers->out, &python);
    PyEval_RestoreThread(python.thread);
    if (failed && !PyErr_Occurred()) {
        const char *text = python.text + (strncmp(python.text, "index ", 6) ? 0 : 6);
        int is_index = !strncmp(text, "out of range", 12); /* eager raises IndexError for these */
        PyObject *torch = strncmp(text, "CUDA out of memory", 18) ? NULL : PyImport_ImportModule("torch");
        PyObject *kind = torch ? PyObject_GetAttrString(torch, "OutOfMemoryError") : NULL;
        PyErr_Format(kind ? kind : is_index ? PyExc_IndexError : PyExc_RuntimeError, "%s",
                     text[0] ? python.text : "a compiled program failed");
        Py_XDECREF(kind);
        Py_XDECREF(torch);
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *list = take_outputs(self, buffers->out, failed);
    if (type) PyErr_Restore(type, value, trace);
    Py_DECREF(self);
    return list;
}

/* Own handles of the tensors among the inputs. On failure none are left. */
static int own_inputs(const Launch *self, PyObject *given, Buffers *buffers) {
    int32_t n = 0;
    for (Py_ssize_t i = 0; i < self->n_inputs; i++) {
        if (self->kinds[i] != 't') continue;
        buffers->in[n] = copy_handle(PyList_GET_ITEM(given, i));
        if (!buffers->in[n++]) {
            while (n--)
                if (buffers->in[n]) delete_handle(buffers->in[n]);
            return -1;
        }
    }
    return n;
}

/* With these arguments, which are the items of `given` if the program is to own and free them. */
static PyObject *run_with(Launch *self, PyObject *const *args, PyObject *given) {
    Buffers buffers;
    if (open_buffers(self, &buffers) < 0) return NULL;
    PyObject *list = NULL;
    int owned = read_arguments(self, args, &buffers);
    if (owned == 0 && given) owned = own_inputs(self, given, &buffers);
    if (owned >= 0 && (!given || PyList_SetSlice(given, 0, PyList_GET_SIZE(given), NULL) == 0))
        list = run_program(self, &buffers, given != NULL);
    for (int n = 0; n < owned; n++)
        if (buffers.in[n]) delete_handle(buffers.in[n]);
    if (buffers.all != buffers.few) PyMem_Free(buffers.all);
    return list;
}

static PyObject *launch_call(PyObject *object, PyObject *const *args, size_t flags, PyObject *names) {
    Launch *self = (Launch *)object;
    if (PyVectorcall_NARGS(flags) != self->n_inputs || (names && PyTuple_GET_SIZE(names)))
        return PyErr_Format(PyExc_TypeError, "expected %zd inputs, got %zd", self->n_inputs,
                            PyVectorcall_NARGS(flags));
    return run_with(self, args, NULL);
}

static PyObject *launch_consume(Launch *self, PyObject *given) {
    if (!PyList_CheckExact(given) || PyList_GET_SIZE(given) != self->n_inputs)
        return PyErr_Format(PyExc_TypeError, "expected a list of %zd inputs", self->n_inputs);
    return run_with(self, ((PyListObject *)given)->ob_item, given);
}

/* -- the type */

static PyObject *launch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", "kinds", "n_outputs", "callables", "keep", NULL};
    unsigned long long address;
    const char *kinds;
    Py_ssize_t n_outputs;
    PyObject *callables = NULL, *keep = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ksn|O!O:Launch", names, &address, &kinds, &n_outputs,
                                     &PyTuple_Type, &callables, &keep))
        return NULL;
    if (strspn(kinds, "tif") != strlen(kinds))
        return PyErr_Format(PyExc_ValueError, "kinds are t, i and f, got '%s'", kinds);
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = launch_call;
    self->program = (Program)(uintptr_t)address;
    self->n_inputs = (Py_ssize_t)strlen(kinds);
    self->n_outputs = n_outputs;
    self->callables = callables ? Py_NewRef(callables) : PyTuple_New(0);
    self->keep = Py_NewRef(keep);
    self->kinds = PyMem_Malloc(self->n_inputs + 1);
    if (self->kinds && self->callables) return strcpy(self->kinds, kinds), (PyObject *)self;
    Py_DECREF(self);
    return PyErr_NoMemory();
}

static int launch_traverse(Launch *self, visitproc visit, void *arg) {
    Py_VISIT(self->callables);
    Py_VISIT(self->keep);
    return 0;
}

static int launch_clear(Launch *self) {
    Py_CLEAR(self->callables);
    Py_CLEAR(self->keep);
    return 0;
}

static void launch_dealloc(Launch *self) {
    PyObject_GC_UnTrack(self);
    launch_clear(self);
    PyMem_Free(self->kinds);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef launch_methods[] = {
    {"consume", (PyCFunction)launch_consume, METH_O, "as a call of the list's items, and empties it"},
    {NULL},
};

TYPE(Launch, launch, "A generated host program, called with tensors and numbers; returns a list of tensors.",
     .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
     .tp_call = PyVectorcall_Call, .tp_vectorcall_offset = offsetof(Launch, vectorcall));
