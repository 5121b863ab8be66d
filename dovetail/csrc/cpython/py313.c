/* CPython 3.13: as 3.12, but for where a frame has its code and its next instruction. */
#define Py_BUILD_CORE_MODULE 1
#include "cpython.h"

#if PY_VERSION_HEX >= 0x030D0000
#include <internal/pycore_frame.h>
#include <opcode.h>

#define CODE f_executable
#define NEXT instr_ptr
#define IS_BEFORE 0
#include "later.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include <internal/pycore_dict.h>

/* Attributes may lie in the instance itself, and storing one there leaves the version of its dict alone.
 * So these values are watched one by one; how many there are is in the header before them. */
int visit_dict_words(PyObject *dict, int (*visit)(const void *address, void *arg), void *arg) {
    PyDictObject *object = (PyDictObject *)dict;
    PyDictValues *values = object->ma_values;
    if (visit(&object->ma_version_tag, arg) < 0) return -1;
    if (!values || !values->embedded) return 0;
    if (visit(&object->ma_values, arg) < 0 || visit(values, arg) < 0) return -1;
    for (int i = 0; i < values->capacity; i++)
        if (values->values[i] && visit(&values->values[i], arg) < 0) return -1;
    return 0;
}

#endif
