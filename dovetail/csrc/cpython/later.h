/* What 3.12 and 3.13 have in common: included by py312.c and py313.c, which say where a frame has its CODE and
 * its NEXT instruction; that may be the one before. */
PyCodeObject *frame_code(Frame *frame) { return (PyCodeObject *)frame->CODE; }
PyObject *frame_function(Frame *frame) { return frame->f_funcobj; }
PyObject *frame_globals(Frame *frame) { return frame->f_globals; }
PyObject **frame_slots(Frame *frame) { return frame->localsplus; }

PyObject *make_returner(PyCodeObject *code) {
    PyObject *empty = PyTuple_New(0);
    PyObject *replace = PyObject_GetAttrString((PyObject *)code, "replace");
    const char instruction[2] = {(char)RETURN_VALUE, 0};
    PyObject *parts =
        Py_BuildValue("{s:y#,s:y#,s:y#}", "co_code", instruction, (Py_ssize_t)2, "co_exceptiontable", "",
                      (Py_ssize_t)0, "co_linetable", "", (Py_ssize_t)0);
    PyObject *made = empty && replace && parts ? PyObject_Call(replace, empty, parts) : NULL;
    Py_XDECREF(parts);
    Py_XDECREF(replace);
    Py_XDECREF(empty);
    return made;
}

PyObject *finish_frame(PyThreadState *thread, Frame *frame, PyObject *returner, PyObject *result) {
    PyObject *code = (PyObject *)frame->CODE;
    frame->CODE = (void *)Py_NewRef(returner);
    frame->NEXT = _PyCode_CODE((PyCodeObject *)returner) - IS_BEFORE;
    Py_DECREF(code);
    if (!result) return _PyEval_EvalFrameDefault(thread, frame, 1);
    frame->localsplus[frame->stacktop++] = result;
    return _PyEval_EvalFrameDefault(thread, frame, 0);
}

PyObject *class_dict(PyTypeObject *type) {
    PyObject *dict = PyType_GetDict(type);
    Py_XDECREF(dict); /* the class holds it */
    return dict;
}

unsigned int class_version(PyTypeObject *type) {
    return PyUnstable_Type_AssignVersionTag(type) ? type->tp_version_tag : 0;
}
