/* One load or one check, with what it tells the memo. The same code answers and explains: a failing check
 * fills run->why if somebody asks. */
#include "guards.h"

#include <structmember.h>

#define PATH(slot) PyTuple_GET_ITEM(run->guards->paths, slot)
#define FAIL(...)                                                                                          \
    do {                                                                                                   \
        if (run->why) *run->why = PyUnicode_FromFormat(__VA_ARGS__);                                       \
        return 0;                                                                                          \
    } while (0)

static int put(Run *run, const Instruction *at, PyObject *borrowed) {
    if (!borrowed) {
        if (PyErr_Occurred()) return -1;
        FAIL("%S: no longer there", PATH(at->slot));
    }
    fill_slot(run, at->slot, borrowed);
    return 1;
}

static int put_new(Run *run, const Instruction *at, PyObject *owned) {
    int done = put(run, at, owned);
    Py_XDECREF(owned);
    return done;
}

/* -- loads */

static int load_arg(Run *run, const Instruction *at) {
    note_pure(run);
    return put(run, at, at->number < run->inputs->n_args ? run->inputs->args[at->number] : NULL);
}

static int load_cell(Run *run, const Instruction *at) {
    PyObject *closure = run->inputs->closure;
    note_pure(run);
    int there = closure && at->number < PyTuple_GET_SIZE(closure);
    return put(run, at, there ? PyCell_GET(PyTuple_GET_ITEM(closure, at->number)) : NULL);
}

static int load_const(Run *run, const Instruction *at) {
    note_pure(run);
    return put(run, at, at->object);
}

/* The instance dict of the object in a slot: NULL where it has none. */
static PyObject *instance_dict(Run *run, int slot) {
    PyObject **place = _PyObject_GetDictPtr(run->slots[slot]);
    note_type(run, slot, run->slots[slot]);
    if (!place) return NULL;
    note_place(run, slot, place);
    if (*place) note_dict(run, slot, *place);
    return *place;
}

static int load_dict_attr(Run *run, const Instruction *at) {
    PyObject *dict = instance_dict(run, at->source);
    return put(run, at, dict ? PyDict_GetItemWithError(dict, at->object) : NULL);
}

static void note_class(Run *run, PyTypeObject *type) { note_word(run, &type->tp_version_tag, 0xffffffff); }

/* The value in a slot made by __slots__. */
static PyObject *slot_value(Run *run, const Instruction *at, PyObject *object, PyObject *descriptor) {
    PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
    PyObject **place = (PyObject **)((char *)object + member->offset);
    if (member->type != T_OBJECT_EX || member->flags || !*place) return NULL;
    note_type(run, at->source, object);
    note_class(run, Py_TYPE(object));
    note_word(run, place, ~0ull);
    return *place;
}

/* An attribute that is found without running any code: in the instance dict with no data descriptor in the
 * way, or in the class without a descriptor. NULL without an exception: not such a case. */
static PyObject *plain_attribute(Run *run, const Instruction *at, PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    int is_module = PyModule_CheckExact(object);
    if ((type->tp_getattro != PyObject_GenericGetAttr && !is_module) || !class_version(type)) return NULL;
    PyObject *in_class = _PyType_Lookup(type, at->object);
    if (in_class && Py_TYPE(in_class) == &PyMemberDescr_Type) return slot_value(run, at, object, in_class);
    if (in_class && Py_TYPE(in_class)->tp_descr_set) return NULL;
    PyObject **place = _PyObject_GetDictPtr(object);
    PyObject *dict = place ? *place : NULL;
    PyObject *value = dict ? PyDict_GetItemWithError(dict, at->object) : NULL;
    if (!value && (is_module || PyErr_Occurred() || !in_class || Py_TYPE(in_class)->tp_descr_get))
        return NULL;
    note_class(run, type);
    instance_dict(run, at->source);
    return value ? value : in_class;
}

/* The same for an attribute of a class. */
static PyObject *plain_class_attribute(Run *run, const Instruction *at, PyObject *object) {
    PyTypeObject *type = (PyTypeObject *)object, *meta = Py_TYPE(object);
    if (meta->tp_getattro != PyType_Type.tp_getattro || !class_version(type) || !class_version(meta))
        return NULL;
    PyObject *in_meta = _PyType_Lookup(meta, at->object), *value = _PyType_Lookup(type, at->object);
    if (in_meta && Py_TYPE(in_meta)->tp_descr_set) return NULL;
    if (!value || (Py_TYPE(value)->tp_descr_get && !PyFunction_Check(value))) return NULL;
    note_type(run, at->source, object);
    note_class(run, meta);
    note_class(run, type);
    return value;
}

/* The parts of a function that calls depend on, and the contents of a cell, are fields. */
static const struct {
    PyTypeObject *type;
    const char *name;
    size_t offset;
} FIELDS[] = {
    {&PyFunction_Type, "__defaults__", offsetof(PyFunctionObject, func_defaults)},
    {&PyFunction_Type, "__kwdefaults__", offsetof(PyFunctionObject, func_kwdefaults)},
    {&PyFunction_Type, "__code__", offsetof(PyFunctionObject, func_code)},
    {&PyFunction_Type, "__closure__", offsetof(PyFunctionObject, func_closure)},
    {&PyCell_Type, "cell_contents", offsetof(PyCellObject, ob_ref)},
};

static PyObject *field_of(Run *run, const Instruction *at, PyObject *object) {
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++) {
        if (!Py_IS_TYPE(object, FIELDS[i].type)) continue;
        if (PyUnicode_CompareWithASCIIString(at->object, FIELDS[i].name)) continue;
        PyObject **field = (PyObject **)((char *)object + FIELDS[i].offset);
        note_type(run, at->source, object);
        note_word(run, field, ~0ull);
        return *field || PyCell_Check(object) ? *field : Py_None; /* an empty cell says so itself */
    }
    return plain_attribute(run, at, object);
}

static int load_attr(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->source];
    PyObject *plain =
        PyType_Check(object) ? plain_class_attribute(run, at, object) : field_of(run, at, object);
    if (plain) return put(run, at, plain);
    if (PyErr_Occurred()) return -1;
    return put_new(run, at, PyObject_GetAttr(object, at->object));
}

static void note_length(Run *run, int slot, PyObject *sequence) {
    note_type(run, slot, sequence);
    note_word(run, &((PyVarObject *)sequence)->ob_size, ~0ull);
}

/* An item of a list or tuple, as a word in its array. */
static int load_element(Run *run, const Instruction *at, PyObject *sequence, PyObject **items) {
    Py_ssize_t size = Py_SIZE(sequence), index = at->number < 0 ? at->number + size : at->number;
    note_length(run, at->source, sequence);
    if (PyList_Check(sequence)) note_word(run, &((PyListObject *)sequence)->ob_item, ~0ull);
    if (index < 0 || index >= size) return put(run, at, NULL);
    note_word(run, &items[index], ~0ull);
    return put(run, at, items[index]);
}

static int load_item(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->source];
    if (PyDict_Check(object)) {
        note_dict(run, at->source, object);
        return put(run, at, PyDict_GetItemWithError(object, at->object));
    }
    int is_index = PyLong_CheckExact(at->object);
    if (is_index && PyTuple_Check(object))
        return load_element(run, at, object, &PyTuple_GET_ITEM(object, 0));
    if (is_index && PyList_Check(object))
        return load_element(run, at, object, ((PyListObject *)object)->ob_item);
    return put_new(run, at, PyObject_GetItem(object, at->object));
}

static int load_dict_key(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->source], *key = NULL;
    if (!PyDict_Check(object)) FAIL("%S: no longer a dict", PATH(at->source));
    note_dict(run, at->source, object);
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; i <= at->number; i++)
        if (!PyDict_Next(object, &position, &key, NULL)) return put(run, at, NULL);
    return put(run, at, key);
}

static int load_applied(Run *run, const Instruction *at) {
    return put_new(run, at, PyObject_CallOneArg(at->object, run->slots[at->source]));
}

static int load_extent(Run *run, const Instruction *at) {
    int64_t value;
    PyObject *object = run->slots[at->source];
    if (!is_tensor(object) || !tensor_extent(object, at->operation == STRIDE, at->number, &value))
        return put(run, at, NULL);
    return put_new(run, at, PyLong_FromLongLong(value));
}

/* -- checks */

static int check_is(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot];
    note_pure(run);
    if (object == at->object) return 1;
    FAIL("%S: expected the object %.100R, got %.100R", PATH(at->slot), at->object, object);
}

static int same_float(double a, double b) {
    return a == b ? read_word(&a) == read_word(&b) : a != a && b != b; /* 0.0 is not -0.0; NaN is NaN */
}

/* Equal and of the same types all the way down. */
static int is_equal(PyObject *a, PyObject *b) {
    if (a == b) return 1;
    if (Py_TYPE(a) != Py_TYPE(b)) return 0;
    if (PyFloat_CheckExact(a)) return same_float(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
    if (PyComplex_CheckExact(a)) {
        Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
        return same_float(x.real, y.real) && same_float(x.imag, y.imag);
    }
    if (PyTuple_Check(a)) {
        if (PyTuple_GET_SIZE(a) != PyTuple_GET_SIZE(b)) return 0;
        int equal = 1;
        for (Py_ssize_t i = 0; equal > 0 && i < PyTuple_GET_SIZE(a); i++)
            equal = is_equal(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i));
        return equal;
    }
    return PyObject_RichCompareBool(a, b, Py_EQ);
}

static int is_mutable(PyObject *object) {
    return Py_TYPE(object)->tp_flags & Py_TPFLAGS_HEAPTYPE || PyList_Check(object) ||
           PyDict_Check(object) || PyAnySet_Check(object) || PyByteArray_Check(object);
}

static int check_equals(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot];
    int equal = is_equal(object, at->object);
    if (object == at->object) note_pure(run);
    else if (!is_mutable(object)) note_held(run, at->slot);
    if (equal) return equal;
    FAIL("%S: expected %.100R, got %.100R", PATH(at->slot), at->object, object);
}

static int check_type_is(Run *run, const Instruction *at) {
    PyTypeObject *type = Py_TYPE(run->slots[at->slot]);
    note_type(run, at->slot, run->slots[at->slot]);
    if ((PyObject *)type == at->object) return 1;
    FAIL("%S: expected a %s, got a %s", PATH(at->slot), ((PyTypeObject *)at->object)->tp_name,
         type->tp_name);
}

static int check_length(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot];
    if (PyDict_Check(object)) note_dict(run, at->slot, object);
    if (PyList_Check(object) || PyTuple_Check(object)) note_length(run, at->slot, object);
    if (PyUnicode_CheckExact(object)) note_pure(run);
    if (PyAnySet_Check(object)) {
        note_type(run, at->slot, object);
        note_word(run, &((PySetObject *)object)->used, ~0ull);
    }
    Py_ssize_t length = PyDict_Check(object) ? PyDict_GET_SIZE(object) : PyObject_Size(object);
    if (length < 0) return -1;
    if (length == at->number) return 1;
    FAIL("%S: expected %zd items, got %zd", PATH(at->slot), at->number, length);
}

static int check_dict_keys(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot], *key;
    if (!PyDict_Check(object)) FAIL("%S: no longer a dict", PATH(at->slot));
    Py_ssize_t position = 0, count = PyTuple_GET_SIZE(at->object);
    int equal = PyDict_GET_SIZE(object) == count, is_ordered = PyODict_Check(object) && count > 1;
    PyObject *keys = is_ordered ? PyODict_Type.tp_iter(object) : NULL; /* an order that no version counts */
    if (!is_ordered) note_dict(run, at->slot, object);
    for (Py_ssize_t i = 0; equal > 0 && i < count; i++) {
        if (is_ordered ? !(key = PyIter_Next(keys)) : !PyDict_Next(object, &position, &key, NULL)) break;
        equal = is_equal(key, PyTuple_GET_ITEM(at->object, i));
        if (is_ordered) Py_DECREF(key);
    }
    Py_XDECREF(keys);
    if (equal) return equal;
    FAIL("%S: expected the keys %.200R", PATH(at->slot), at->object);
}

static int check_lacks(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot], *dict = object;
    if (at->number) {
        dict = instance_dict(run, at->slot);
        if (!dict) return 1;
    } else if (PyDict_Check(object)) {
        note_dict(run, at->slot, object);
    } else {
        FAIL("%S: no longer a dict", PATH(at->slot));
    }
    int there = PyDict_Contains(dict, at->object);
    if (there <= 0) return there < 0 ? -1 : 1;
    FAIL("%S: now has %.100R", PATH(at->slot), at->object);
}

static int check_same_as(Run *run, const Instruction *at) {
    int same = run->slots[at->slot] == run->slots[at->source];
    note_pure(run);
    if (same == !!at->number) return 1;
    FAIL("%S: %s %S", PATH(at->slot),
         same ? "is now the same object as" : "is no longer the same object as", PATH(at->source));
}

static int check_tensor_is(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot];
    int holds = check_tensor(at->tensor, object, PATH(at->slot), run->why);
    if (holds > 0) note_tensor(run, at->tensor, object);
    return holds;
}

static int is_number(PyObject *object) {
    return object && (PyLong_CheckExact(object) || PyFloat_CheckExact(object));
}

/* The same contents in the class and its bases, compared by identity; numbers that are read have guards of
 * their own, so that a class may count. */
static int is_same_class(PyObject *mro, PyObject *pairs) {
    if (PyTuple_GET_SIZE(mro) != PyTuple_GET_SIZE(pairs)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); i++) {
        PyObject *base = PyTuple_GET_ITEM(mro, i), *pair = PyTuple_GET_ITEM(pairs, i);
        PyObject *now = class_dict((PyTypeObject *)base), *then = PyTuple_GET_ITEM(pair, 1);
        if (base != PyTuple_GET_ITEM(pair, 0)) return 0;
        PyObject *key, *value;
        Py_ssize_t position = 0;
        if (PyDict_GET_SIZE(now) != PyDict_GET_SIZE(then)) return 0;
        while (PyDict_Next(then, &position, &key, &value)) {
            PyObject *found = PyDict_GetItemWithError(now, key);
            if (found != value && !(is_number(found) && is_number(value))) return PyErr_Occurred() ? -1 : 0;
        }
    }
    return 1;
}

static int check_class_is(Run *run, const Instruction *at) {
    PyObject *object = run->slots[at->slot], *first = PyTuple_GET_ITEM(at->object, 0);
    PyTypeObject *type = (PyTypeObject *)PyTuple_GET_ITEM(first, 0);
    if (object != (PyObject *)type)
        FAIL("%S: expected the class %s, got %.100R", PATH(at->slot), type->tp_name, object);
    unsigned int version = class_version(type);
    if (!version || version != at->version) {
        int same = is_same_class(type->tp_mro, at->object);
        if (same < 0) return -1;
        if (!same) FAIL("%S: the class %s or a base of it was changed", PATH(at->slot), type->tp_name);
        ((Instruction *)at)->version = version;
    }
    if (version) note_class(run, type);
    return 1;
}

static int check_state_is(Run *run, const Instruction *at) { return check_state(at->state, run->why); }

static int check_holds(Run *run, const Instruction *at) {
    return check_expression(at->expression, run->slots, at->object, run->why);
}

static int check_predicate(Run *run, const Instruction *at) {
    PyObject *answer = PyObject_CallOneArg(PyTuple_GET_ITEM(at->object, 0), run->slots[at->slot]);
    int holds = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (holds) return holds;
    FAIL("%S: %S no longer holds", PATH(at->slot), PyTuple_GET_ITEM(at->object, 1));
}

/* In the order of Operation. */
// clang-format off
static int (*const STEPS[])(Run *, const Instruction *) = {
    load_arg, load_cell, load_const, load_attr, load_dict_attr, load_item, load_dict_key,
    load_extent, load_extent, load_applied,
    check_is, check_equals, check_type_is, check_length, check_dict_keys, check_lacks, check_same_as,
    check_tensor_is, check_class_is, check_state_is, check_holds, check_predicate,
};
// clang-format on
_Static_assert(sizeof STEPS / sizeof *STEPS == PREDICATE + 1, "a step for each operation");

int take_step(Run *run, const Instruction *instruction) {
    return STEPS[instruction->operation](run, instruction);
}
