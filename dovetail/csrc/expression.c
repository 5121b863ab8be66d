/* A condition on sizes and integers, as a postfix program on 64-bit integers.
 *
 *     s0 * 4 <= 64      READ 0, CONST 4, MUL, CONST 64, LE
 *
 * A read is a slot: an int, or a tensor with which size or stride of it. What does not fit 64 bits, or
 * divides by zero, does not hold. */
#include "guards.h"

/* The order is that of ARITHMETIC in runtime/guards.py. */
enum { PUSH, READ, ADD, MUL, FLOORDIV, MOD, MIN, MAX, EQ, LT, LE, AND, NOT };
enum { STACK = 64 };

typedef struct {
    int slot, which; /* which: -1 an int, 0 a size, 1 a stride */
    Py_ssize_t dim;
} Reading;

struct Expression {
    int n_reads, n_operations;
    Reading *reads; /* behind the operations */
    struct {
        int code;
        int64_t value;
    } operations[];
};

static int read_parts(Expression *made, PyObject *reads, PyObject *operations) {
    for (int i = 0; i < made->n_reads; i++) {
        Reading *reading = &made->reads[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(reads, i), "iin", &reading->slot, &reading->which,
                              &reading->dim))
            return -1;
    }
    int height = 0, highest = 0;
    for (int i = 0; i < made->n_operations; i++) {
        long long value;
        int code;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(operations, i), "iL", &code, &value)) return -1;
        if (code < PUSH || code > NOT || (code == READ && (value < 0 || value >= made->n_reads)))
            return PyErr_SetString(PyExc_ValueError, "a condition with an unknown operation or read"), -1;
        height += code <= READ ? 1 : code == NOT ? 0 : -1;
        if (height > highest) highest = height;
        made->operations[i].code = code, made->operations[i].value = value;
    }
    if (height == 1 && highest <= STACK) return 0;
    PyErr_SetString(PyExc_ValueError, "a condition is too deep or leaves no answer");
    return -1;
}

/* (reads, operations) */
Expression *make_expression(PyObject *program) {
    PyObject *reads, *operations;
    if (!PyArg_ParseTuple(program, "O!O!", &PyTuple_Type, &reads, &PyTuple_Type, &operations)) return NULL;
    Py_ssize_t n_reads = PyTuple_GET_SIZE(reads), n_operations = PyTuple_GET_SIZE(operations);
    size_t before_reads = sizeof(Expression) + n_operations * sizeof((Expression *)0)->operations[0];
    Expression *made = PyMem_Calloc(1, before_reads + n_reads * sizeof(Reading));
    if (!made) return (Expression *)PyErr_NoMemory();
    made->n_reads = (int)n_reads, made->n_operations = (int)n_operations;
    made->reads = (Reading *)((char *)made + before_reads);
    if (read_parts(made, reads, operations) == 0) return made;
    PyMem_Free(made);
    return NULL;
}

int visit_reads(const Expression *expression, int (*visit)(int slot, void *arg), void *arg) {
    for (int i = 0; i < expression->n_reads; i++)
        if (visit(expression->reads[i].slot, arg) < 0) return -1;
    return 0;
}

static int read_value(const Reading *reading, PyObject *const *slots, int64_t *value) {
    PyObject *object = slots[reading->slot];
    if (reading->which >= 0)
        return is_tensor(object) && tensor_extent(object, reading->which, reading->dim, value);
    if (!PyLong_Check(object)) return 0;
    int overflow;
    *value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
}

static int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

/* a <- a op b; 0 where that has no 64-bit answer. */
static int combine(int code, int64_t *a, int64_t b) {
    switch (code) {
    case ADD: return !__builtin_add_overflow(*a, b, a);
    case MUL: return !__builtin_mul_overflow(*a, b, a);
    case FLOORDIV: return b && !(b == -1 && *a == INT64_MIN) && (*a = floor_divide(*a, b), 1);
    case MOD: return b && !(b == -1 && *a == INT64_MIN) && (*a -= floor_divide(*a, b) * b, 1);
    case MIN: *a = *a < b ? *a : b; return 1;
    case MAX: *a = *a > b ? *a : b; return 1;
    case EQ: *a = *a == b; return 1;
    case LT: *a = *a < b; return 1;
    case LE: *a = *a <= b; return 1;
    case AND: *a = *a && b; return 1;
    }
    return 0;
}

static int evaluate_expression(const Expression *expression, PyObject *const *slots, int64_t *answer) {
    int64_t stack[STACK];
    int top = -1;
    for (int i = 0; i < expression->n_operations; i++) {
        int code = expression->operations[i].code;
        int64_t value = expression->operations[i].value;
        if (code == PUSH) {
            stack[++top] = value;
        } else if (code == READ) {
            if (!read_value(&expression->reads[value], slots, &stack[++top])) return 0;
        } else if (code == NOT) {
            stack[top] = !stack[top];
        } else {
            top--;
            if (!combine(code, &stack[top], stack[top + 1])) return 0;
        }
    }
    *answer = stack[0];
    return 1;
}

int check_expression(const Expression *expression, PyObject *const *slots, PyObject *text, PyObject **why) {
    int64_t answer = 0;
    if (evaluate_expression(expression, slots, &answer) && answer) return 1;
    if (!why) return 0;
    PyObject *values = PyList_New(0);
    for (int i = 0; values && i < expression->n_reads; i++) {
        int64_t value = 0;
        read_value(&expression->reads[i], slots, &value);
        PyObject *number = PyLong_FromLongLong(value);
        if (!number || PyList_Append(values, number) < 0) Py_CLEAR(values);
        Py_XDECREF(number);
    }
    if (values) *why = PyUnicode_FromFormat("%U no longer holds; its symbols are now %R", text, values);
    Py_XDECREF(values);
    return 0;
}
