/* CPython 3.12: the evaluator clears the frame. A frame that ends early is therefore given a code object
 * whose only instruction returns the top of the stack, and evaluated. */
#define Py_BUILD_CORE_MODULE 1
#include "cpython.h"

#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000
#include <internal/pycore_frame.h>
#include <opcode.h>

#define CODE f_code
#define NEXT prev_instr
#define IS_BEFORE 1
#include "later.h"

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
int visit_dict_words(PyObject *dict, int (*visit)(const void *address, void *arg), void *arg) {
    return visit(&((PyDictObject *)dict)->ma_version_tag, arg);
}

#endif
