/* A program of guards: loads that step from slot to slot along paths, and checks on slots, in the order in
 * which the values were read. Loads are grouped by the root of their path, because what was found below an
 * unchanged root need not be looked up again (memo.c). */
#ifndef DOVETAIL_GUARDS_H
#define DOVETAIL_GUARDS_H

#include "native.h"

/* The order is that of OPERATIONS in runtime/guards.py. */
// clang-format off
enum Operation {
    ARG, CELL, CONST, ATTR, DICT_ATTR, ITEM, DICT_KEY, SIZE, STRIDE, APPLIED,
    /* the checks */
    IS, EQUALS, TYPE_IS, LENGTH, DICT_KEYS, LACKS, SAME_AS, TENSOR, CLASS_IS, STATE, HOLDS, PREDICATE
};
// clang-format on
#define IS_LOAD(operation) ((operation) < IS)
#define IS_ROOT(operation) ((operation) <= CONST)

typedef struct Expression Expression;

typedef struct {
    enum Operation operation;
    int slot;          /* what a load fills or a check looks at */
    int source;        /* the slot a load steps from; the other slot of SAME_AS; else -1 */
    Py_ssize_t number; /* an index, length or flag */
    PyObject *object;  /* a name, key, expected value or callable, or all of them; what `made` refers to */
    unsigned int version; /* of a class */
    union {
        void *made;
        TensorSpec *tensor;
        State *state;
        Expression *expression;
    };
} Instruction;

/* Instructions on one root, in order; `memos` remembers successful runs by the root object. */
typedef struct Memo Memo;

typedef struct {
    int *order, count;
    int root;  /* the slot of the root; -1 for constants, which share a group */
    int steps; /* loads beyond roots: only those are worth a memo */
    Memo **memos;
    int n_memos, last;
    uint64_t made, used; /* memos made, and times one was of use */
} Group;

typedef struct {
    PyObject_HEAD Instruction *instructions;
    int count, n_slots, n_groups;
    Group *groups;
    int *late, n_late;        /* instructions that look at several groups or at none */
    int *fetch, n_fetch;      /* slots whose values a hit hands out */
    char *wanted;             /* slots that late instructions look at */
    int *group_of, *position; /* slot -> the group that loads it, and where in its order */
    PyObject *paths;          /* slot -> its path, whose str() explains */
    PyObject **scratch;       /* slots for one run at a time, all NULL between runs */
    int *scratch_touched, busy;
} Guards;

/* One run. Slots hold references. */
typedef struct {
    const Guards *guards;
    const Inputs *inputs;
    PyObject **slots;
    int *touched, n_touched;     /* slots that are filled */
    PyObject **why;              /* where a failing check explains itself; NULL when nobody asks */
    struct Recording *recording; /* the memo being made; NULL otherwise */
} Run;

void fill_slot(Run *run, int slot, PyObject *borrowed);

/* 1 done or holds, 0 fails, -1 exception. */
int take_step(Run *run, const Instruction *instruction);

/* -- memo.c: 1 the group holds, 0 it does not, -1 exception */
int run_group(Run *run, Group *group);
void release_memo(Memo *memo);
int visit_memo(const Memo *memo, visitproc visit, void *arg);

/* What a step tells the memo being recorded. A step that tells nothing is run every time. */
void note_pure(Run *run);
void note_held(Run *run, int slot);
void note_word(Run *run, const void *address, uint64_t mask);
void note_type(Run *run, int slot, PyObject *object);
void note_place(Run *run, int slot, PyObject **place);
void note_dict(Run *run, int slot, PyObject *dict);
void note_tensor(Run *run, const TensorSpec *spec, PyObject *tensor);

/* -- expression.c: a postfix program on integers */
Expression *make_expression(PyObject *program);
int check_expression(const Expression *expression, PyObject *const *slots, PyObject *text, PyObject **why);
int visit_reads(const Expression *expression, int (*visit)(int slot, void *arg), void *arg);

#endif
