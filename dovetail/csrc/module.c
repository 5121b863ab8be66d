/* dovetail._native: the frame hook, guards and launches. dovetail/_native.pyi says what each name means. */
#include "native.h"

static PyMethodDef torch_methods[] = {
    {"attach_torch", attach_torch, METH_VARARGS, "attach_torch(base, *layout, *functions)"},
    {"lies_as", (PyCFunction)(void (*)(void))lies_as, METH_FASTCALL, "lies_as(tensor, plain, extents)"},
    {"attach_watch", attach_watch, METH_VARARGS, "attach_watch(storage, offset, version, count, memory)"},
    {"arena_functions", arena_functions, METH_NOARGS, "addresses of take(bytes) and give(start)"},
    {"tensor_states", tensor_states, METH_VARARGS, "tensor_states(inputs, spec) -> bytes"},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dovetail._native",
    .m_doc = "The frame hook, guards and launches.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    PyTypeObject *const types[] = {&ContextType, &GuardsType, &LaunchType};
    int failed = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types && !failed; i++)
        failed = PyModule_AddType(module, types[i]) < 0;
    if (failed || PyModule_AddFunctions(module, hook_methods) < 0 ||
        PyModule_AddFunctions(module, torch_methods) < 0 || init_hook(module) < 0)
        Py_CLEAR(module);
    return module;
}
