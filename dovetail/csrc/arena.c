/* Memory for temporaries of generated programs, kept between calls: one 64-byte aligned block a thread, as
 * large as the largest program it ran. A program that runs inside another gets a block of its own. */
#include "native.h"
#include <pthread.h>
#include <stdlib.h>

typedef struct {
    void *start;
    int64_t size;
    int taken;
} Block;

static pthread_key_t key;

static void end_thread(void *block) {
    free(((Block *)block)->start);
    free(block);
}

__attribute__((constructor)) static void begin(void) { pthread_key_create(&key, end_thread); }

static void *take(int64_t size) {
    Block *block = pthread_getspecific(key);
    if (!block) {
        if (!(block = calloc(1, sizeof *block))) return NULL;
        pthread_setspecific(key, block);
    }
    if (block->taken) return aligned_alloc(64, size);
    if (block->size < size) {
        free(block->start);
        block->start = aligned_alloc(64, size);
        block->size = block->start ? size : 0;
    }
    block->taken = block->start != NULL;
    return block->start;
}

static void give(void *start) {
    Block *block = pthread_getspecific(key);
    if (start == block->start)
        block->taken = 0;
    else
        free(start);
}

PyObject *arena_functions(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none)) {
    return Py_BuildValue("NN", PyLong_FromVoidPtr((void *)take), PyLong_FromVoidPtr((void *)give));
}
