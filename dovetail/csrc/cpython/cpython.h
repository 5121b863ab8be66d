/* What differs between CPython versions, behind one set of names. py311.c, py312.c and py313.c each
 * define all of it for their own version and are empty for the others. */
#ifndef DOVETAIL_CPYTHON_H
#define DOVETAIL_CPYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stddef.h>
#include <stdint.h>

struct _PyInterpreterFrame;
typedef struct _PyInterpreterFrame Frame;

PyCodeObject *frame_code(Frame *frame);
PyObject *frame_function(Frame *frame); /* borrowed; not always a function */
PyObject *frame_globals(Frame *frame);
PyObject **frame_slots(Frame *frame); /* the argument slots come first */

/* A code object with the layout of `code` that returns the top of its stack; None where the version
 * needs none. A new reference. */
PyObject *make_returner(PyCodeObject *code);

/* Ends a frame that was never evaluated, with a result (stolen) or with the pending exception. */
PyObject *finish_frame(PyThreadState *thread, Frame *frame, PyObject *returner, PyObject *result);

/* Visits the words of memory of which one changes with every change of a dict, and which are never all the
 * same for another dict that comes to lie at its address. */
int visit_dict_words(PyObject *dict, int (*visit)(const void *address, void *arg), void *arg);

/* The dict of a class, borrowed. */
PyObject *class_dict(PyTypeObject *type);

/* The class's version tag, made valid if that is possible; 0 where it is not. */
unsigned int class_version(PyTypeObject *type);

#endif
