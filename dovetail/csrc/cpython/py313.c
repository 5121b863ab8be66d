/* CPython 3.13: as 3.12, with the code in f_executable and instr_ptr at the next instruction. */
#define Py_BUILD_CORE_MODULE 1
#include "cpython.h"

#if PY_VERSION_HEX >= 0x030D0000
#include <internal/pycore_frame.h>
#include <opcode.h>

PyCodeObject *frame_code(Frame *frame) { return (PyCodeObject *)frame->f_executable; }
PyObject *frame_function(Frame *frame) { return frame->f_funcobj; }
PyObject *frame_globals(Frame *frame) { return frame->f_globals; }
PyObject **frame_slots(Frame *frame) { return frame->localsplus; }

#include "returner.h"

PyObject *finish_frame(PyThreadState *thread, Frame *frame, PyObject *returner, PyObject *result) {
    PyObject *code = frame->f_executable;
    frame->f_executable = Py_NewRef(returner);
    frame->instr_ptr = _PyCode_CODE((PyCodeObject *)returner);
    Py_DECREF(code);
    if (!result) return _PyEval_EvalFrameDefault(thread, frame, 1);
    frame->localsplus[frame->stacktop++] = result;
    return _PyEval_EvalFrameDefault(thread, frame, 0);
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
const uint64_t *dict_version(PyObject *dict) { return &((PyDictObject *)dict)->ma_version_tag; }

PyObject *class_dict(PyTypeObject *type) {
    PyObject *dict = PyType_GetDict(type);
    Py_XDECREF(dict); /* the class holds it */
    return dict;
}

unsigned int class_version(PyTypeObject *type) {
    return PyUnstable_Type_AssignVersionTag(type) ? type->tp_version_tag : 0;
}
#endif
