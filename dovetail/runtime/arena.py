"""Memory for temporaries, kept between calls, and what malloc does with freed memory.

Each thread keeps one block, as large as the largest program it ran; a program that runs inside
another on the same thread gets a block of its own. 64-byte aligned.
"""
from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Final

TRIM_THRESHOLD: Final = -1
MMAP_THRESHOLD: Final = -3
"""Parameters of glibc's mallopt."""
KEPT: Final = 512 << 20
LARGE: Final = 32 << 20
"""Blocks above this are mapped and unmapped one by one: the most that glibc's own adjusting reaches."""


@cache
def keep_freed_memory() -> bool:
    """Results and saved values come and go with every call. glibc gives the end of its heap back to the
    system once 128 KiB of it are free, and every page is a fault when it is needed again. False where the
    user has decided otherwise, or malloc is not glibc's."""
    decided = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in decided):
        return False
    return bool(mallopt(TRIM_THRESHOLD, KEPT) and mallopt(MMAP_THRESHOLD, LARGE))

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
