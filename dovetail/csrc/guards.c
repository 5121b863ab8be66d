/* Guards: built once from a flat program (runtime/guards.py makes it from ir.guard.Guard), checked at every
 * call. One run has three parts: each group of instructions with a common root, replayed from a memo where
 * possible; then the late instructions, which compare across roots or look at torch's state. */
#include "guards.h"

/* -- building */

static int make_extra(Instruction *at, PyObject *extra) {
    switch (at->operation) {
    case TENSOR: return (at->tensor = make_tensor_spec(at->object, extra)) ? 0 : -1;
    case STATE: return (at->state = make_state(at->object)) ? 0 : -1;
    case HOLDS: return (at->expression = make_expression(extra)) ? 0 : -1;
    default: return 0;
    }
}

static int is_slot(const Guards *self, int slot) { return slot >= 0 && slot < self->n_slots; }

static int read_instruction(Guards *self, Instruction *at, PyObject *tuple) {
    PyObject *object, *extra;
    int operation;
    if (!PyArg_ParseTuple(tuple, "iiinOO", &operation, &at->slot, &at->source, &at->number, &object, &extra))
        return -1;
    int needs_source = operation == SAME_AS || (IS_LOAD(operation) && !IS_ROOT(operation));
    int needs_slot = operation != STATE && operation != HOLDS;
    if (operation < 0 || operation > PREDICATE || (needs_source && !is_slot(self, at->source)) ||
        (needs_slot && !is_slot(self, at->slot)) || (operation == TENSOR && !PyType_Check(object)) ||
        ((operation == CLASS_IS || operation == PREDICATE) && !PyTuple_Check(object)))
        return PyErr_Format(PyExc_ValueError, "malformed guard instruction %.200R", tuple), -1;
    if (!needs_source) at->source = -1;
    if (!needs_slot) at->slot = -1;
    at->operation = operation;
    at->object = Py_NewRef(object);
    return make_extra(at, extra);
}

static int want(int slot, void *arg) {
    Guards *self = arg;
    if (!is_slot(self, slot))
        return PyErr_SetString(PyExc_ValueError, "a condition reads an unknown slot"), -1;
    self->wanted[slot] = 1;
    return 0;
}

/* The group of an instruction, or -1 for a late one. Group 0 is that of constants. */
static int group_for(Guards *self, const Instruction *at) {
    if (at->operation == STATE || at->operation == HOLDS) return -1;
    if (at->operation == CONST) return 0;
    if (IS_ROOT(at->operation)) return self->n_groups;
    if (IS_LOAD(at->operation)) return self->group_of[at->source];
    int group = self->group_of[at->slot];
    return at->operation == SAME_AS && self->group_of[at->source] != group ? -1 : group;
}

static int add_to_group(Guards *self, int index) {
    Instruction *at = &self->instructions[index];
    int number = group_for(self, at);
    if (number < 0) {
        self->late[self->n_late++] = index;
        if (at->operation == HOLDS) return visit_reads(at->expression, want, self);
        if (at->operation == SAME_AS) self->wanted[at->slot] = self->wanted[at->source] = 1;
        return 0;
    }
    Group *group = &self->groups[number];
    if (number == self->n_groups) {
        self->n_groups++;
        group->root = at->slot;
    }
    int *order = PyMem_Realloc(group->order, (group->count + 1) * sizeof *order);
    if (!order) return PyErr_NoMemory(), -1;
    group->order = order;
    if (IS_LOAD(at->operation)) self->group_of[at->slot] = number, self->position[at->slot] = group->count;
    if (IS_LOAD(at->operation) && (!IS_ROOT(at->operation) || number == 0)) group->steps++;
    order[group->count++] = index;
    return 0;
}

/* One block of memory, which begins with the instructions. */
static int allocate(Guards *self, size_t count, size_t n_slots) {
    size_t groups = count + 1;
    self->instructions =
        PyMem_Calloc(1, count * (sizeof(Instruction) + sizeof(int)) + groups * sizeof(Group) +
                            n_slots * (sizeof(PyObject *) + 3 * sizeof(int) + 1));
    if (!self->instructions) return PyErr_NoMemory(), -1;
    self->groups = (Group *)(self->instructions + count);
    self->scratch = (PyObject **)(self->groups + groups);
    self->late = (int *)(self->scratch + n_slots);
    self->group_of = self->late + count;
    self->position = self->group_of + n_slots;
    self->scratch_touched = self->position + n_slots;
    self->wanted = (char *)(self->scratch_touched + n_slots);
    return 0;
}

static int read_fetch(Guards *self, PyObject *fetch) {
    self->n_fetch = (int)PyTuple_GET_SIZE(fetch);
    self->fetch = PyMem_Calloc(self->n_fetch + 1, sizeof *self->fetch);
    if (!self->fetch) return PyErr_NoMemory(), -1;
    for (int i = 0; i < self->n_fetch; i++) {
        self->fetch[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(fetch, i));
        if (PyErr_Occurred() || want(self->fetch[i], self) < 0) return -1;
    }
    return 0;
}

static PyObject *guards_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *program, *paths, *fetch;
    if (!PyArg_ParseTuple(args, "O!O!O!:Guards", &PyTuple_Type, &program, &PyTuple_Type, &paths,
                          &PyTuple_Type, &fetch))
        return NULL;
    Guards *self = (Guards *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    int count = (int)PyTuple_GET_SIZE(program);
    self->n_slots = (int)PyTuple_GET_SIZE(paths);
    self->paths = Py_NewRef(paths);
    int failed = allocate(self, count, self->n_slots) < 0;
    if (!failed) self->groups[0].root = -1, self->n_groups = 1;
    for (int i = 0; !failed && i < count; i++) {
        self->count++;
        failed = read_instruction(self, &self->instructions[i], PyTuple_GET_ITEM(program, i)) < 0 ||
                 add_to_group(self, i) < 0;
    }
    if (!failed && read_fetch(self, fetch) == 0) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* -- running */

void fill_slot(Run *run, int slot, PyObject *borrowed) {
    if (!run->slots[slot]) run->touched[run->n_touched++] = slot;
    Py_XSETREF(run->slots[slot], Py_NewRef(borrowed));
}

/* Slots for a run: the scratch, unless a run is under way already (a predicate that calls compiled code). */
static int open_run(Guards *self, Run *run) {
    if (!self->busy) {
        self->busy = 1;
        run->slots = self->scratch, run->touched = self->scratch_touched;
        return 0;
    }
    run->slots = PyMem_Calloc(self->n_slots + 1, sizeof *run->slots);
    run->touched = PyMem_Calloc(self->n_slots + 1, sizeof *run->touched);
    if (run->slots && run->touched) return 0;
    PyMem_Free(run->slots);
    PyMem_Free(run->touched);
    PyErr_NoMemory();
    return -1;
}

static void close_run(Guards *self, Run *run) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (int i = 0; i < run->n_touched; i++) Py_CLEAR(run->slots[run->touched[i]]);
    if (run->slots == self->scratch) {
        self->busy = 0;
    } else {
        PyMem_Free(run->slots);
        PyMem_Free(run->touched);
    }
    PyErr_Restore(type, value, trace);
}

/* A path that raises is a guard that fails; an interrupt goes on. */
static int forgive(int done, PyObject **why) {
    if (done >= 0 || !PyErr_ExceptionMatches(PyExc_Exception)) return done;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (why && !*why) *why = PyUnicode_FromFormat("a guard raised %.200R", value ? value : type);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return 0;
}

static void hand_out(const Run *run, PyObject **fetched) {
    for (int i = 0; i < run->guards->n_fetch; i++)
        fetched[i] = Py_NewRef(run->slots[run->guards->fetch[i]]);
}

int guards_check(PyObject *guards, const Inputs *inputs, PyObject **fetched) {
    Guards *self = (Guards *)guards;
    Run run = {.guards = self, .inputs = inputs};
    int done = 1;
    if (open_run(self, &run) < 0) return -1;
    for (int i = 0; done > 0 && i < self->n_groups; i++) done = run_group(&run, &self->groups[i]);
    for (int i = 0; done > 0 && i < self->n_late; i++)
        done = take_step(&run, &self->instructions[self->late[i]]);
    if (done > 0 && fetched) hand_out(&run, fetched);
    done = forgive(done, NULL);
    close_run(self, &run);
    return done;
}

Py_ssize_t guards_fetch_count(PyObject *guards) { return ((Guards *)guards)->n_fetch; }

int guards_fetch(PyObject *guards, const Inputs *inputs, PyObject **fetched) {
    Guards *self = (Guards *)guards;
    Run run = {.guards = self, .inputs = inputs};
    int done = 1;
    if (open_run(self, &run) < 0) return -1;
    for (int i = 0; done > 0 && i < self->count; i++)
        if (IS_LOAD(self->instructions[i].operation)) done = take_step(&run, &self->instructions[i]);
    if (done > 0) hand_out(&run, fetched);
    if (done == 0) PyErr_SetString(PyExc_RuntimeError, "a path that was just read is no longer there");
    close_run(self, &run);
    return done > 0 ? 0 : -1;
}

PyObject *guards_why(PyObject *guards, const Inputs *inputs) {
    Guards *self = (Guards *)guards;
    PyObject *text = NULL;
    Run run = {.guards = self, .inputs = inputs, .why = &text};
    int done = 1;
    if (open_run(self, &run) < 0) return NULL;
    for (int i = 0; i < self->count && done > 0; i++) done = take_step(&run, &self->instructions[i]);
    done = forgive(done, &text);
    close_run(self, &run);
    if (done > 0) Py_RETURN_NONE;
    if (done < 0) Py_CLEAR(text);
    return text;
}

/* -- the type */

static int guards_traverse(Guards *self, visitproc visit, void *arg) {
    for (int i = 0; i < self->count; i++) Py_VISIT(self->instructions[i].object);
    for (int i = 0; i < self->n_groups; i++)
        for (int j = 0; j < self->groups[i].n_memos; j++) {
            int stop = visit_memo(self->groups[i].memos[j], visit, arg);
            if (stop) return stop;
        }
    return 0;
}

static int guards_clear(Guards *self) {
    for (int i = 0; i < self->n_groups; i++) {
        for (int j = 0; j < self->groups[i].n_memos; j++) release_memo(self->groups[i].memos[j]);
        PyMem_Free(self->groups[i].memos);
        PyMem_Free(self->groups[i].order);
    }
    self->n_groups = 0;
    int count = self->count;
    self->count = self->n_late = 0;
    for (int i = 0; i < count; i++) {
        PyMem_Free(self->instructions[i].made);
        Py_CLEAR(self->instructions[i].object);
    }
    return 0;
}

static void guards_dealloc(Guards *self) {
    PyObject_GC_UnTrack(self);
    guards_clear(self);
    Py_XDECREF(self->paths);
    PyMem_Free(self->fetch);
    PyMem_Free(self->instructions);
    Py_TYPE(self)->tp_free(self);
}

static int read_inputs(PyObject *args, Inputs *inputs) {
    PyObject *slots, *closure, *globals;
    if (!PyArg_ParseTuple(args, "O!OO!", &PyTuple_Type, &slots, &closure, &PyDict_Type, &globals))
        return -1;
    if (closure != Py_None && !PyTuple_Check(closure))
        return PyErr_SetString(PyExc_TypeError, "closure must be a tuple of cells or None"), -1;
    *inputs = (Inputs){&PyTuple_GET_ITEM(slots, 0), PyTuple_GET_SIZE(slots),
                       closure == Py_None ? NULL : closure, globals};
    return 0;
}

static PyObject *check_method(PyObject *self, PyObject *args) {
    Inputs inputs;
    if (read_inputs(args, &inputs) < 0) return NULL;
    int holds = guards_check(self, &inputs, NULL);
    return holds < 0 ? NULL : PyBool_FromLong(holds);
}

static PyObject *why_method(PyObject *self, PyObject *args) {
    Inputs inputs;
    return read_inputs(args, &inputs) < 0 ? NULL : guards_why(self, &inputs);
}

static PyMethodDef guards_methods[] = {
    {"check", check_method, METH_VARARGS, "check(args, closure, globals): whether all guards hold"},
    {"why", why_method, METH_VARARGS, "what the first that fails says, or None"},
    {NULL},
};

TYPE(Guards, guards, "A program of guards; built by dovetail.runtime.guards.make_guards.",
     .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC);
