"""Memory for temporaries, kept between calls.

Each thread keeps one block, as large as the largest program it ran; a program that runs inside
another on the same thread gets a block of its own. 64-byte aligned.
"""
from __future__ import annotations

from typing import Final

TEXT: Final = """\
typedef long int64_t;
extern "C" {
int posix_memalign(void**, unsigned long, unsigned long);
void free(void*);
void* calloc(unsigned long, unsigned long);
int pthread_key_create(unsigned*, void (*)(void*));
void* pthread_getspecific(unsigned);
int pthread_setspecific(unsigned, const void*);
}
struct Block { void* start; int64_t size; bool taken; };
static unsigned key;
static void end_thread(void* p) { free(((Block*)p)->start); free(p); }
__attribute__((constructor)) static void begin() { pthread_key_create(&key, end_thread); }
static Block* mine() {
    Block* block = (Block*)pthread_getspecific(key);
    if (!block) { block = (Block*)calloc(1, sizeof(Block)); pthread_setspecific(key, block); }
    return block;
}
extern "C" void* dv_take(int64_t size) {
    Block* block = mine();
    void* p = nullptr;
    if (block->taken) return posix_memalign(&p, 64, size) ? nullptr : p;
    if (block->size < size) {
        free(block->start);
        block->start = nullptr; block->size = 0;
        if (posix_memalign(&block->start, 64, size)) return nullptr;
        block->size = size;
    }
    block->taken = true;
    return block->start;
}
extern "C" void dv_give(void* p) {
    Block* block = mine();
    if (p == block->start) block->taken = false; else free(p);
}
"""
