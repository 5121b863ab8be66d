/* The nouns of dovetail._native and who owns them.
 *
 *     hook.c     Context: the frame hook and its table, code -> entries
 *     guards.c   Guards: a program of loads and checks, run when a frame may be replaced
 *     steps.c    one load or check
 *     memo.c     what a successful run leaves behind, so that the next one only compares words
 *     tensor.c   reading a tensor's metadata without torch's headers
 *     state.c    reading torch's global state
 *     launch.c   Launch: calling a generated host program with tensors
 */
#ifndef DOVETAIL_NATIVE_H
#define DOVETAIL_NATIVE_H

#include "cpython/cpython.h"

/* A class whose objects hold others; its functions have names that begin with `stem`. */
#define TYPE(Name, stem, doc, ...)                                                                  \
    PyTypeObject Name##Type = {                                                                     \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = "dovetail._native." #Name,                         \
        .tp_basicsize = sizeof(Name), .tp_doc = doc, .tp_methods = stem##_methods,                  \
        .tp_new = stem##_new, .tp_dealloc = (destructor)stem##_dealloc,                             \
        .tp_traverse = (traverseproc)stem##_traverse, .tp_clear = (inquiry)stem##_clear,            \
        __VA_ARGS__}

/* The frame of a call as guards see it. Everything is borrowed. */
typedef struct {
    PyObject **args;
    Py_ssize_t n_args;
    PyObject *closure; /* a tuple of cells, or NULL */
    PyObject *globals;
} Inputs;

/* -- guards.c */
extern PyTypeObject GuardsType;

/* 1: all hold; 0: one does not; -1: an exception that is not an Exception (KeyboardInterrupt). Where all
 * hold, `fetched` (unless NULL) gets a new reference to each value that the guards were built to fetch. */
int guards_check(PyObject *guards, const Inputs *inputs, PyObject **fetched);

/* The same values without any check: 0, or -1 with an exception. */
int guards_fetch(PyObject *guards, const Inputs *inputs, PyObject **fetched);
Py_ssize_t guards_fetch_count(PyObject *guards);

/* What the first guard that fails says, or None; the same run, with explanations on. */
PyObject *guards_why(PyObject *guards, const Inputs *inputs);

/* -- words: memory that must not have changed since guards held. They are many and read at every call, so
 * they are small: an aligned address, with the number of a mask in the bits that addresses do not use. */
enum { MASKS = 32, ADDRESS_BITS = 48 };

typedef struct {
    uint64_t address, expected;
} Word;

typedef struct {
    Word *items;
    int count, capacity, n_masks;
    int mergeable; /* words before this one are settled */
    uint64_t masks[MASKS];
} Words;

/* Adds the masked bits at an address; its index, or -1 without memory. */
int add_word(Words *words, const void *address, uint64_t mask);

static inline uint64_t read_word(const void *address) {
    uint64_t value;
    memcpy(&value, address, sizeof value);
    return value;
}

static inline const void *word_address(const Word *word) {
    return (const void *)(word->address & ((1ull << ADDRESS_BITS) - 1));
}

static inline uint64_t word_now(const Words *words, const Word *word) {
    return read_word(word_address(word)) & words->masks[word->address >> ADDRESS_BITS];
}

/* -- tensor.c */
#define ANY INT64_MIN

typedef struct {
    PyTypeObject *type;
    int64_t dtype, device_kind, device_index, requires_grad;
    uint64_t dispatch;
    Py_ssize_t ndim;
    int64_t sizes_and_strides[]; /* ANY where free */
} TensorSpec;

PyObject *attach_torch(PyObject *module, PyObject *args);
PyObject *lies_as(PyObject *module, PyObject *const *args, Py_ssize_t count);
int is_tensor(PyObject *object);
void *tensor_handle(PyObject *tensor);
TensorSpec *make_tensor_spec(PyObject *type, PyObject *tuple); /* borrows the type */
int check_tensor(const TensorSpec *spec, PyObject *object, PyObject *path, PyObject **why);
/* The words that a successful check read; 0 if they do not say all of it, -1 without memory. */
int tensor_words(const TensorSpec *spec, PyObject *tensor, Words *words);
/* A size (which=0) or stride (which=1); 0 if there is no such dimension. */
int tensor_extent(PyObject *tensor, int which, Py_ssize_t dim, int64_t *value);
PyObject *wrap_borrowed(void *handle);
PyObject *wrap_handle(void *handle); /* deletes the handle */
void delete_handle(void *handle);
void *copy_handle(PyObject *tensor); /* a new handle, or NULL with an exception */

/* -- state.c: values of torch's global state, each read by a function of libtorch or a Python callable */
typedef struct State State;
State *make_state(PyObject *reads); /* borrows */
int check_state(const State *state, PyObject **why);

/* -- watch.c */
PyObject *attach_watch(PyObject *module, PyObject *args);
PyObject *tensor_states(PyObject *module, PyObject *args);

/* -- arena.c */
PyObject *arena_functions(PyObject *module, PyObject *none);

/* -- launch.c */
extern PyTypeObject LaunchType;

/* -- hook.c */
extern PyTypeObject ContextType;
extern PyMethodDef hook_methods[];
int init_hook(PyObject *module);

#endif
