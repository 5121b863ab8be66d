/* CPython 3.11: whoever called the evaluator clears and pops the frame, so finishing is returning. */
#define Py_BUILD_CORE_MODULE 1
#include "cpython.h"

#if PY_VERSION_HEX < 0x030C0000
#include <internal/pycore_frame.h>

PyCodeObject *frame_code(Frame *frame) { return frame->f_code; }
PyObject *frame_function(Frame *frame) { return (PyObject *)frame->f_func; }
PyObject *frame_globals(Frame *frame) { return frame->f_globals; }
PyObject **frame_slots(Frame *frame) { return frame->localsplus; }

PyObject *make_returner(PyCodeObject *code) {
    (void)code;
    return Py_NewRef(Py_None);
}

PyObject *finish_frame(PyThreadState *thread, Frame *frame, PyObject *returner, PyObject *result) {
    (void)thread, (void)frame, (void)returner;
    return result;
}

int visit_dict_words(PyObject *dict, int (*visit)(const void *address, void *arg), void *arg) {
    return visit(&((PyDictObject *)dict)->ma_version_tag, arg);
}

PyObject *class_dict(PyTypeObject *type) { return type->tp_dict; }

unsigned int class_version(PyTypeObject *type) {
    if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) {
        PyObject *name = PyUnicode_InternFromString("__class__");
        if (name) _PyType_Lookup(type, name); /* a lookup is what gives a class its tag */
        Py_XDECREF(name);
    }
    return type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG ? type->tp_version_tag : 0;
}
#endif
