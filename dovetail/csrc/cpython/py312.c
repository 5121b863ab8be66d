/* CPython 3.12: the evaluator clears the frame. A frame that ends early is therefore given a code object
 * whose only instruction returns the top of the stack, and evaluated. */
#define Py_BUILD_CORE_MODULE 1
#include "cpython.h"

#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
#include <internal/pycore_frame.h>
#include <opcode.h>

PyCodeObject *frame_code(Frame *frame) { return frame->f_code; }

#include "later.h"

PyObject *finish_frame(PyThreadState *thread, Frame *frame, PyObject *returner, PyObject *result) {
    PyCodeObject *code = frame->f_code;
    frame->f_code = (PyCodeObject *)Py_NewRef(returner);
    frame->prev_instr = _PyCode_CODE(frame->f_code) - 1;
    Py_DECREF(code);
    if (!result) return _PyEval_EvalFrameDefault(thread, frame, 1);
    frame->localsplus[frame->stacktop++] = result;
    return _PyEval_EvalFrameDefault(thread, frame, 0);
}

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
int visit_dict_words(PyObject *dict, int (*visit)(const void *address, void *arg), void *arg) {
    return visit(&((PyDictObject *)dict)->ma_version_tag, arg);
}

#endif
