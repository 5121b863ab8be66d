/* The frame hook: frame -> guards of the code's entries -> the entry that fits, called with the frame's
 * own argument slots and closure cells.
 *
 *     context.run(f, (x,))    f's frame, and those of what f calls, are looked up in the context's table;
 *                             a code met for the first time goes to the compile callback
 *
 * The evaluator is replaced only while some thread is inside such a call, so other code pays nothing.
 * The GIL protects the tables. Whatever runs Python (a guard's predicate, the callback) may change
 * them, so entries and records are held by reference across it. */
#include "native.h"

#include <pthread.h>

/* An entry is a tuple: the guards under which it may run, the function that replaces the frame, the globals
 * that the frame must have. */
#define GUARDS(entry) PyTuple_GET_ITEM(entry, 0)
#define FUNCTION(entry) PyTuple_GET_ITEM(entry, 1)
#define GLOBALS(entry) PyTuple_GET_ITEM(entry, 2)

static int is_entry(PyObject *object) {
    return PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 3 && Py_TYPE(GUARDS(object)) == &GuardsType &&
           PyDict_Check(GLOBALS(object));
}

/* FULL: its entries are used, and a miss runs the frame as it is. */
enum { FRESH, ACTIVE, FULL, SKIP, SKIP_CALLEES };
static const char *const STATE_NAMES[] = {"fresh", "active", "full", "skip", "skip_callees"};

typedef struct {
    Py_ssize_t references;
    PyCodeObject *code;
    PyObject *returner;
    int state;
    PyObject *entries; /* a list, the last used first */
} Record;

#define COUNT(record) PyList_GET_SIZE((record)->entries)

typedef struct {
    PyObject_HEAD PyObject *payload, *callback;
    Record **table; /* open addressing by the code's address; a power of two */
    Py_ssize_t capacity, used;
} Context;

static _Thread_local Context *current; /* the context of the compiled call under way on this thread */
static _Thread_local int off;          /* set_enabled(False) */
static _Thread_local Py_ssize_t depth; /* compiled calls under way on this thread */
static Py_ssize_t active;              /* compiled calls under way anywhere */
static _PyFrameEvalFunction previous;  /* what was installed before us */
static _Thread_local PyObject *handed; /* arguments that the next frame has, and nobody else is to hold */
static PyObject *skip_callees;         /* the callback's word for SKIP_CALLEES */

static PyObject *evaluate(PyThreadState *thread, Frame *frame, int throwing);

/* -- records */

static void release(Record *record) {
    if (--record->references) return;
    Py_DECREF(record->entries);
    Py_XDECREF(record->returner);
    Py_DECREF(record->code);
    PyMem_Free(record);
}

static Record **place_of(Record **table, Py_ssize_t capacity, PyCodeObject *code) {
    size_t at = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15ull >> 20;
    for (;; at++) {
        Record **place = &table[at & (capacity - 1)];
        if (!*place || (*place)->code == code) return place;
    }
}

static Record *find_record(Context *self, PyCodeObject *code) {
    return self->capacity ? *place_of(self->table, self->capacity, code) : NULL;
}

static int grow(Context *self) {
    Py_ssize_t capacity = self->capacity ? self->capacity * 2 : 64;
    Record **table = PyMem_Calloc(capacity, sizeof(Record *));
    if (!table) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < self->capacity; i++)
        if (self->table[i]) *place_of(table, capacity, self->table[i]->code) = self->table[i];
    PyMem_Free(self->table);
    self->table = table, self->capacity = capacity;
    return 0;
}

static Record *record_for(Context *self, PyCodeObject *code) {
    Record *record = find_record(self, code);
    if (record) return record;
    if (2 * (self->used + 1) > self->capacity && grow(self) < 0) return NULL;
    PyObject *entries = PyList_New(0);
    record = entries ? PyMem_Calloc(1, sizeof(Record)) : NULL;
    if (!record) {
        Py_XDECREF(entries);
        return (Record *)PyErr_NoMemory();
    }
    record->references = 1, record->entries = entries;
    record->code = (PyCodeObject *)Py_NewRef(code);
    self->used++;
    return *place_of(self->table, self->capacity, code) = record;
}

/* The record of a frame about to run; NULL is an exception. */
static Record *record_to_run(Context *self, PyCodeObject *code) {
    Record *record = record_for(self, code);
    if (record && !record->returner) record->returner = make_returner(code);
    return record && record->returner ? record : NULL;
}

/* Puts an entry in front; one that is already there moves. */
static int put_first(Record *record, PyObject *entry) {
    Py_ssize_t at = 0, count = COUNT(record);
    while (at < count && PyList_GET_ITEM(record->entries, at) != entry) at++;
    if (PyList_Insert(record->entries, 0, entry) < 0) return -1;
    return at < count ? PyList_SetSlice(record->entries, at + 1, at + 2, NULL) : 0;
}

/* -- the switch */

static void enter(void) {
    depth++;
    if (active++) return;
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    previous = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (previous == evaluate) previous = _PyEval_EvalFrameDefault;
    _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate);
}

static void leave(void) {
    depth--;
    if (--active) return;
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    if (_PyInterpreterState_GetEvalFrameFunc(interpreter) == evaluate) /* else another tool came after us */
        _PyInterpreterState_SetEvalFrameFunc(interpreter, previous);
}

static void after_fork(void) { active = depth; } /* only this thread goes on in the child */

/* Runs a call with another context (or none) current on this thread. */
#define WITH_CONTEXT(context, prepare, call, restore)                                                      \
    do {                                                                                                   \
        Context *before = current;                                                                         \
        current = (context);                                                                               \
        prepare;                                                                                           \
        call;                                                                                              \
        restore;                                                                                           \
        current = before;                                                                                  \
    } while (0)

/* Runs a call with no hook on this thread; and with none at all if no other thread needs it. */
#define WITHOUT_HOOK(call) WITH_CONTEXT(NULL, if (before) leave(), call, if (before) enter())

/* Runs guards: the Python code behind a property or predicate of theirs is not intercepted. */
#define QUIETLY(call) WITH_CONTEXT(NULL, , call, )

/* -- a frame */

static Py_ssize_t count_args(PyCodeObject *code) {
    return code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
           !!(code->co_flags & CO_VARKEYWORDS);
}

/* The call of an entry: the frame's arguments, the function's cells, then what the guards fetched. */
enum { FEW_SLOTS = 24 };

typedef struct {
    PyObject *entry; /* a reference */
    PyObject **slots, *few[FEW_SLOTS];
    Py_ssize_t fixed, fetched; /* only what was fetched is held */
} Call;

static int open_call(Call *call, PyObject *entry, const Inputs *inputs) {
    Py_ssize_t cells = inputs->closure ? PyTuple_GET_SIZE(inputs->closure) : 0;
    Py_ssize_t room = guards_fetch_count(GUARDS(entry));
    call->entry = Py_NewRef(entry);
    call->fixed = inputs->n_args + cells, call->fetched = 0;
    call->slots = inputs->args;
    if (!cells && !room) return 0;
    call->slots = call->few;
    if (call->fixed + room > FEW_SLOTS)
        call->slots = PyMem_Malloc((call->fixed + room) * sizeof *call->slots);
    if (!call->slots) {
        Py_CLEAR(call->entry);
        return PyErr_NoMemory(), -1;
    }
    memcpy(call->slots, inputs->args, inputs->n_args * sizeof *call->slots);
    if (cells)
        memcpy(call->slots + inputs->n_args, &PyTuple_GET_ITEM(inputs->closure, 0),
               cells * sizeof *call->slots);
    return 0;
}

static void close_call(Call *call, const Inputs *inputs) {
    for (Py_ssize_t i = 0; i < call->fetched; i++) Py_DECREF(call->slots[call->fixed + i]);
    if (call->slots != call->few && call->slots != inputs->args) PyMem_Free(call->slots);
    Py_CLEAR(call->entry);
}

static PyObject *make_call(Call *call, const Inputs *inputs) {
    PyObject *result =
        PyObject_Vectorcall(FUNCTION(call->entry), call->slots, call->fixed + call->fetched, NULL);
    close_call(call, inputs);
    return result;
}

/* 1: *call is ready; 0: no entry fits; -1: an exception. */
static int find_entry(Record *record, const Inputs *inputs, Call *call) {
    for (Py_ssize_t i = 0; i < COUNT(record); i++) {
        PyObject *entry = PyList_GET_ITEM(record->entries, i);
        if (GLOBALS(entry) != inputs->globals) continue;
        if (open_call(call, entry, inputs) < 0) return -1;
        int fits = guards_check(GUARDS(entry), inputs, call->slots + call->fixed);
        if (fits > 0) call->fetched = guards_fetch_count(GUARDS(entry));
        if (fits > 0 && i > 0 && put_first(record, entry) < 0) fits = -1;
        if (fits > 0) return 1;
        close_call(call, inputs);
        if (fits < 0) return -1;
    }
    return 0;
}

/* A new entry is run without asking its guards. */
static int prepare_new(Record *record, PyObject *entry, const Inputs *inputs, Call *call) {
    if (open_call(call, entry, inputs) < 0) return -1;
    Py_ssize_t count = guards_fetch_count(GUARDS(entry));
    if (put_first(record, entry) < 0 ||
        (count && guards_fetch(GUARDS(entry), inputs, call->slots + call->fixed) < 0)) {
        close_call(call, inputs);
        return -1;
    }
    call->fetched = count;
    return 1;
}

/* Why the entry used last does not fit: a string, or None where there is no entry. */
static PyObject *why_miss(Record *record, const Inputs *inputs) {
    if (!COUNT(record)) return Py_NewRef(Py_None);
    PyObject *entry = PyList_GET_ITEM(record->entries, 0);
    if (GLOBALS(entry) != inputs->globals)
        return PyUnicode_FromString("the function's globals are another module's");
    Py_INCREF(entry);
    PyObject *text = guards_why(GUARDS(entry), inputs);
    Py_DECREF(entry);
    return text;
}

static PyObject *call_compiler(Context *self, Record *record, PyObject *function, const Inputs *inputs,
                               PyObject *args, PyObject *why) {
    PyObject *closure = inputs->closure ? inputs->closure : Py_None;
    return PyObject_CallFunction(self->callback, "OOOOOOOn", self->payload, record->code, function,
                                 inputs->globals, args, closure, why, COUNT(record));
}

static PyObject *ask_compiler(Context *self, Record *record, PyObject *function, const Inputs *inputs) {
    PyObject *why;
    QUIETLY(why = why_miss(record, inputs));
    PyObject *args = why ? PyTuple_New(inputs->n_args) : NULL;
    PyObject *answer = NULL;
    if (args) {
        for (Py_ssize_t i = 0; i < inputs->n_args; i++)
            PyTuple_SET_ITEM(args, i, Py_NewRef(inputs->args[i] ? inputs->args[i] : Py_None));
        if (previous == _PyEval_EvalFrameDefault)
            WITHOUT_HOOK(answer = call_compiler(self, record, function, inputs, args, why));
        else /* another compiler's evaluator, which is not to compile this one */
            QUIETLY(answer = call_compiler(self, record, function, inputs, args, why));
    }
    Py_XDECREF(args);
    Py_XDECREF(why);
    return answer;
}

/* The entry's own frame is not intercepted; what it calls is. */
static int skip_own_code(Context *self, Record *record, PyObject *entry) {
    PyObject *code = PyFunction_Check(FUNCTION(entry)) ? PyFunction_GET_CODE(FUNCTION(entry)) : NULL;
    if (!code || code == (PyObject *)record->code) return 0;
    Record *own = record_for(self, (PyCodeObject *)code);
    if (own && own->state == FRESH) own->state = SKIP;
    return own ? 0 : -1;
}

/* What the compiler says about a miss: 1 *call is ready, 0 run the frame as it is (and call *told where it
 * does not raise), 2 look again, -1 an exception. */
static int on_miss(Context *self, Record *record, PyObject *function, const Inputs *inputs, Call *call,
                   PyObject **told) {
    PyObject *answer = ask_compiler(self, record, function, inputs);
    if (!answer) return -1;
    if (is_entry(answer)) {
        record->state = ACTIVE;
        int done = skip_own_code(self, record, answer);
        if (done == 0) QUIETLY(done = prepare_new(record, answer, inputs, call));
        Py_DECREF(answer);
        return done;
    }
    if (PyCallable_Check(answer)) {
        *told = answer;
        return 0;
    }
    int next = answer == Py_True ? 2 : 0;
    int known = next || answer == Py_None || answer == Py_False || answer == skip_callees;
    if (answer == Py_False) record->state = COUNT(record) ? FULL : SKIP;
    if (answer == skip_callees) record->state = SKIP_CALLEES;
    if (!known) PyErr_Format(PyExc_TypeError, "the compile callback returned %.100R", answer);
    Py_DECREF(answer);
    return known ? next : -1;
}

/* A call that the compiler passes by once, as one that raises, runs without the hook, down to what it calls. */
static PyObject *run_skipped(PyThreadState *thread, Frame *frame, Record *record) {
    if (record->state == SKIP || record->state == FULL) return _PyEval_EvalFrameDefault(thread, frame, 0);
    PyObject *result;
    WITHOUT_HOOK(result = _PyEval_EvalFrameDefault(thread, frame, 0));
    return result;
}

/* Call back after a frame that was thought to raise and did not. */
static PyObject *tell(PyObject *told, PyObject *result) {
    PyObject *answer = NULL;
    if (result) WITHOUT_HOOK(answer = PyObject_CallNoArgs(told));
    if (!answer) Py_CLEAR(result); /* a warning that is an error */
    Py_XDECREF(answer);
    Py_DECREF(told);
    return result;
}

static PyObject *intercept(PyThreadState *thread, Frame *frame, Context *self, Record *record) {
    PyObject *function = frame_function(frame);
    PyObject *closure = PyFunction_GET_CLOSURE(function);
    Inputs inputs = {frame_slots(frame), count_args(record->code), closure, frame_globals(frame)};
    Call call;
    PyObject *told = NULL;
    int found = 2;
    record->references++;
    Py_INCREF(self);
    while (found == 2) {
        QUIETLY(found = find_entry(record, &inputs, &call));
        if (found == 0 && record->state != FULL)
            found = on_miss(self, record, function, &inputs, &call, &told);
        if (found != 2) break;
        Record *now = record_to_run(self, record->code); /* another one where the context was cleared */
        if (!now) found = -1;
        else now->references++, release(record), record = now;
    }
    Py_DECREF(self);
    PyObject *result = found > 0 ? make_call(&call, &inputs) : NULL;
    result = found ? finish_frame(thread, frame, record->returner, result)
                   : run_skipped(thread, frame, record);
    release(record);
    return told ? tell(told, result) : result;
}

enum { NEVER = CO_GENERATOR | CO_COROUTINE | CO_ITERABLE_COROUTINE | CO_ASYNC_GENERATOR };

static PyObject *evaluate(PyThreadState *thread, Frame *frame, int throwing) {
    Context *self = current;
    if (handed) Py_CLEAR(handed);
    if (!self || off || throwing) return _PyEval_EvalFrameDefault(thread, frame, throwing);
    PyCodeObject *code = frame_code(frame);
    Record *record = find_record(self, code);
    if (record && record->state == SKIP) return _PyEval_EvalFrameDefault(thread, frame, 0);
    /* A debugger steps through the user's own frames, and its own are not compiled either. */
    if (thread->tracing || thread->c_tracefunc || code->co_flags & NEVER ||
        !(code->co_flags & CO_OPTIMIZED) || !PyFunction_Check(frame_function(frame)))
        return _PyEval_EvalFrameDefault(thread, frame, 0);
    if ((!record || !record->returner) && !(record = record_to_run(self, code))) {
        PyErr_Clear(); /* no memory, or no stack: the frame still runs, and meets that itself */
        return _PyEval_EvalFrameDefault(thread, frame, 0);
    }
    if (record->state == SKIP_CALLEES) return run_skipped(thread, frame, record);
    return intercept(thread, frame, self, record);
}

/* -- Context */

static PyObject *context_run(Context *self, PyObject *const *args, Py_ssize_t count) {
    if (count < 2 || count > 3 || !PyTuple_Check(args[1]) || (count > 2 && !PyDict_Check(args[2])))
        return PyErr_Format(PyExc_TypeError, "expected run(fn, args, kwargs={})");
    PyObject *function = args[0], *positional = args[1], *keywords = count > 2 ? args[2] : NULL, *result;
    if (off) return PyObject_Call(function, positional, keywords);
    Py_INCREF(self);
    WITH_CONTEXT(self, enter(), result = PyObject_Call(function, positional, keywords), leave());
    Py_DECREF(self);
    return result;
}

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"payload", "callback", NULL};
    PyObject *payload, *callback;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Context", names, &payload, &callback)) return NULL;
    if (!PyCallable_Check(callback)) return PyErr_Format(PyExc_TypeError, "callback must be callable");
    Context *self = (Context *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->payload = Py_NewRef(payload);
    self->callback = Py_NewRef(callback);
    return (PyObject *)self;
}

static int context_traverse(Context *self, visitproc visit, void *arg) {
    Py_VISIT(self->payload);
    Py_VISIT(self->callback);
    for (Py_ssize_t i = 0; i < self->capacity; i++) {
        Record *record = self->table[i];
        if (!record || record->references > 1) continue; /* a running frame holds it too */
        Py_VISIT(record->entries);
    }
    return 0;
}

static void drop_table(Context *self) {
    Record **table = self->table;
    Py_ssize_t capacity = self->capacity;
    self->table = NULL, self->capacity = self->used = 0;
    for (Py_ssize_t i = 0; i < capacity; i++)
        if (table[i]) release(table[i]);
    PyMem_Free(table);
}

static int context_clear(Context *self) {
    Py_CLEAR(self->payload);
    Py_CLEAR(self->callback);
    drop_table(self);
    return 0;
}

static void context_dealloc(Context *self) {
    PyObject_GC_UnTrack(self);
    context_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *context_entries(Context *self, PyObject *code) {
    Record *record = find_record(self, (PyCodeObject *)code);
    return record ? PyList_GetSlice(record->entries, 0, COUNT(record)) : PyList_New(0);
}

static PyObject *context_drop(Context *self, PyObject *Py_UNUSED(ignored)) {
    drop_table(self);
    Py_RETURN_NONE;
}

static PyObject *context_codes(Context *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *states = PyDict_New();
    for (Py_ssize_t i = 0; states && i < self->capacity; i++) {
        Record *record = self->table[i];
        if (!record) continue;
        PyObject *name = PyUnicode_FromString(STATE_NAMES[record->state]);
        if (!name || PyDict_SetItem(states, (PyObject *)record->code, name) < 0) Py_CLEAR(states);
        Py_XDECREF(name);
    }
    return states;
}

static PyMethodDef context_methods[] = {
    {"run", (PyCFunction)(void (*)(void))context_run, METH_FASTCALL, "run(fn, args, kwargs={})"},
    {"entries", (PyCFunction)context_entries, METH_O, "the entries of a code object, the last used first"},
    {"clear", (PyCFunction)context_drop, METH_NOARGS, "drop everything"},
    {"codes", (PyCFunction)context_codes, METH_NOARGS, "every code met so far and its state"},
    {NULL},
};

TYPE(Context, context, "One per compiled function: the entries of every code object met under it.",
     .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC);

/* -- functions of the module */

static PyObject *set_enabled(PyObject *Py_UNUSED(module), PyObject *value) {
    int on = PyObject_IsTrue(value);
    if (on < 0) return NULL;
    int before = !off;
    off = !on;
    return PyBool_FromLong(before);
}

static PyObject *without(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count,
                         PyObject *names) {
    if (!count) return PyErr_Format(PyExc_TypeError, "without(fn, ...) takes a function");
    PyObject *result;
    WITHOUT_HOOK(result = PyObject_Vectorcall(args[0], args + 1, count - 1, names));
    return result;
}

/* A call does not look at its arguments again once the frame has them, so they may go with what the frame
 * lets go of: an abandoned generator ends in time. */
static PyObject *hand_over(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "hand_over(fn, box) takes two arguments");
    handed = PySequence_GetItem(args[1], 0);
    PyObject *result = handed && !PySequence_DelItem(args[1], 0) ? PyObject_Call(args[0], handed, NULL) : NULL;
    Py_CLEAR(handed);
    return result;
}

static PyObject *is_installed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == evaluate);
}

PyMethodDef hook_methods[] = {
    {"set_enabled", set_enabled, METH_O, "turn compiled calls on this thread on or off; what it was"},
    {"without", (PyCFunction)(void (*)(void))without, METH_FASTCALL | METH_KEYWORDS, "fn, no hook"},
    {"hand_over", (PyCFunction)(void (*)(void))hand_over, METH_FASTCALL, "fn(*box.pop())"},
    {"is_installed", is_installed, METH_NOARGS, "whether the evaluator is ours at this moment"},
    {NULL},
};

int init_hook(PyObject *module) {
    pthread_atfork(NULL, NULL, after_fork);
    skip_callees = PyUnicode_InternFromString("skip_callees");
    return skip_callees ? PyModule_AddObjectRef(module, "SKIP_CALLEES", skip_callees) : -1;
}
