/* What a successful run of a group of guards leaves behind: the words of memory that its outcome was read
 * from, in the order of reading. As long as they are unchanged, every object on the paths is the same as
 * before, and nothing needs to be looked up:
 *
 *     self.layers[3].weight     type of self, its dict's place and version, the version of _modules, ...,
 *                               the tensor's sizes, strides, keys
 *
 * A word is only read after those before it were found unchanged, and those say that what it lies in is
 * still alive. A dict with another version is repaired: the keys that were read are looked up again, and if
 * they give the same objects, the new version is as good. Steps that cannot be put in words (a property, a
 * predicate) are run each time.
 *
 * An address can only stand for an object if the object is not freed and its address used again. Numbers,
 * strings and constants compared by value, whose contents are not in words, are therefore held by the memo.
 * Everything else is told from a successor by its type and contents, and not held: a memo keeps no model
 * and no tensor alive. */
#include "guards.h"

enum { MOST_MEMOS = 256, AHEAD = 24 };

/* A step that looked something up in a dict, and the words of that dict. */
typedef struct {
    int position, first, count;
    PyObject *dict; /* only compared while recording */
} Link;

struct Memo {
    int references;
    PyObject *root;
    int count;
    PyObject **values; /* by position in the group's order: what a load found */
    char *held;
    Words words;
    Link *links;
    int n_links;
    int *needed, n_needed;     /* positions whose values later steps look at */
    int *residual, n_residual; /* positions to run each time */
};

typedef struct Recording {
    Memo *memo;
    int position, noted, failed;
    Link *dict_of;               /* slot -> the dict found there */
    char *typed, *placed, *held; /* slots whose type, or dict's place, is noted; slots to be held */
} Recording;

/* -- words */

static int number_of_mask(Words *words, uint64_t mask) {
    int number = 0;
    while (number < words->n_masks && words->masks[number] != mask) number++;
    if (number == MASKS) return -1;
    if (number == words->n_masks) words->masks[words->n_masks++] = mask;
    return number;
}

static int set_word(Words *words, int index, const void *address, uint64_t mask) {
    int number = number_of_mask(words, mask);
    if (number < 0 || (uintptr_t)address >> ADDRESS_BITS) return -1;
    words->items[index] =
        (Word){(uintptr_t)address | (uint64_t)number << ADDRESS_BITS, read_word(address) & mask};
    return index;
}

static int append_word(Words *words, const void *address, uint64_t mask) {
    if (words->count == words->capacity) {
        int capacity = words->capacity ? words->capacity * 2 : 64;
        Word *items = PyMem_Realloc(words->items, capacity * sizeof(Word));
        if (!items) return -1;
        words->items = items, words->capacity = capacity;
    }
    return set_word(words, words->count, address, mask) < 0 ? -1 : words->count++;
}

int add_word(Words *words, const void *address, uint64_t mask) {
    unsigned offset = (uintptr_t)address & 7;
    address = (const char *)address - offset;
    mask <<= 8 * offset;
    for (int i = words->count - 1; i >= words->mergeable && i >= words->count - 4;
         i--) /* they share a word */
        if (word_address(&words->items[i]) == address)
            return set_word(words, i, address,
                            mask | words->masks[words->items[i].address >> ADDRESS_BITS]);
    return append_word(words, address, mask);
}

static int append_dict_word(const void *address, void *words) { return append_word(words, address, ~0ull); }

/* -- notes */

void note_pure(Run *run) {
    if (run->recording) run->recording->noted = 1;
}

void note_word(Run *run, const void *address, uint64_t mask) {
    if (!run->recording) return;
    run->recording->noted = 1;
    if (add_word(&run->recording->memo->words, address, mask) < 0) run->recording->failed = 1;
}

/* A plain value is held by the memo, and so stays what it is. */
static int is_plain(PyObject *object) {
    return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
           PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || PyBytes_CheckExact(object) ||
           PyComplex_CheckExact(object);
}

void note_held(Run *run, int slot) {
    note_pure(run);
    if (run->recording) run->recording->held[slot] = 1;
}

void note_type(Run *run, int slot, PyObject *object) {
    note_pure(run);
    if (!run->recording || run->recording->typed[slot] || is_plain(object)) return;
    run->recording->typed[slot] = 1;
    note_word(run, &object->ob_type, ~0ull);
}

void note_place(Run *run, int slot, PyObject **place) {
    if (!run->recording || run->recording->placed[slot]) return;
    run->recording->placed[slot] = 1;
    note_word(run, place, ~0ull);
}

void note_dict(Run *run, int slot, PyObject *dict) {
    Recording *recording = run->recording;
    if (!recording) return;
    Memo *memo = recording->memo;
    Words *words = &memo->words;
    Link *known = &recording->dict_of[slot];
    note_pure(run);
    if (!known->count || known->dict != dict) {
        *known = (Link){.first = words->count, .dict = dict};
        if (visit_dict_words(dict, append_dict_word, words) < 0) recording->failed = 1;
        known->count = words->count - known->first;
        words->mergeable = words->count;
    }
    known->position = recording->position;
    memo->links[memo->n_links++] = *known;
}

void note_tensor(Run *run, const TensorSpec *spec, PyObject *tensor) {
    if (!run->recording) return;
    int complete = tensor_words(spec, tensor, &run->recording->memo->words);
    if (complete < 0) run->recording->failed = 1;
    run->recording->noted = complete > 0;
}

/* -- the memo's own life */

void release_memo(Memo *memo) {
    if (!memo || --memo->references) return;
    for (int i = 0; i < memo->count; i++)
        if (memo->held[i]) Py_DECREF(memo->values[i]);
    PyMem_Free(memo->words.items);
    PyMem_Free(memo);
}

int visit_memo(const Memo *memo, visitproc visit, void *arg) {
    for (int i = 0; i < memo->count; i++)
        if (memo->held[i]) Py_VISIT(memo->values[i]);
    return 0;
}

/* Its arrays lie behind it. */
static Memo *make_memo(int count) {
    Memo *memo =
        PyMem_Calloc(1, sizeof *memo + count * (sizeof(PyObject *) + sizeof(Link) + 2 * sizeof(int) + 1));
    if (!memo) return NULL;
    memo->references = 1;
    memo->count = count;
    memo->values = (PyObject **)(memo + 1);
    memo->links = (Link *)(memo->values + count);
    memo->needed = (int *)(memo->links + count);
    memo->residual = memo->needed + count;
    memo->held = (char *)(memo->residual + count);
    return memo;
}

/* -- recording */

/* Runs the group, noting words. `residual` says for each slot that its value is not in words. */
static int record_steps(Run *run, Group *group, Recording *recording, char *residual) {
    const Guards *guards = run->guards;
    Memo *memo = recording->memo;
    for (int position = 0; position < group->count; position++) {
        const Instruction *at = &guards->instructions[group->order[position]];
        recording->position = position, recording->noted = 0;
        int links = memo->n_links;
        int done = take_step(run, at);
        if (done <= 0) return done;
        int subject = IS_LOAD(at->operation) ? at->source : at->slot;
        int depends = (subject >= 0 && residual[subject]) || (at->source >= 0 && residual[at->source]);
        if (IS_LOAD(at->operation)) {
            memo->values[position] = run->slots[at->slot];
            residual[at->slot] = depends || !recording->noted;
        }
        if (!depends && recording->noted) continue;
        memo->n_links = links; /* it is run anyway; nothing to repair */
        memo->residual[memo->n_residual++] = position;
    }
    return 1;
}

/* Marks what residual and late steps look at, and takes hold of what words say nothing about. */
static void settle(const Guards *guards, const Group *group, const Recording *recording,
                   const char *residual, char *wanted) {
    Memo *memo = recording->memo;
    memcpy(wanted, guards->wanted, guards->n_slots);
    for (int i = 0; i < memo->n_residual; i++) {
        const Instruction *at = &guards->instructions[group->order[memo->residual[i]]];
        if (at->source >= 0) wanted[at->source] = 1;
        if (!IS_LOAD(at->operation)) wanted[at->slot] = 1;
    }
    for (int position = 0; position < memo->count; position++) {
        const Instruction *at = &guards->instructions[group->order[position]];
        if (!IS_LOAD(at->operation) || residual[at->slot]) continue;
        if (wanted[at->slot]) memo->needed[memo->n_needed++] = position;
        if (!recording->held[at->slot] && !is_plain(memo->values[position])) continue;
        memo->held[position] = 1;
        Py_INCREF(memo->values[position]);
    }
}

static void keep_memo(Group *group, Memo *memo) {
    int at = 0;
    while (at < group->n_memos && group->memos[at]->root != memo->root) at++;
    if (at == group->n_memos && at == MOST_MEMOS) at = (group->last + 1) % MOST_MEMOS;
    if (at == group->n_memos) {
        Memo **memos = PyMem_Realloc(group->memos, (at + 1) * sizeof *memos);
        if (!memos) return release_memo(memo);
        group->memos = memos;
        group->memos[group->n_memos++] = NULL;
    }
    Memo *before = group->memos[at];
    group->memos[at] = memo;
    group->last = at;
    group->made++;
    release_memo(before);
}

static int run_plain(Run *run, Group *group) {
    int done = 1;
    for (int i = 0; done > 0 && i < group->count; i++)
        done = take_step(run, &run->guards->instructions[group->order[i]]);
    return done;
}

static int run_recording(Run *run, Group *group, PyObject *root) {
    int n_slots = run->guards->n_slots;
    Memo *memo = make_memo(group->count);
    Link *dict_of = PyMem_Calloc(n_slots, sizeof *dict_of);
    char *flags = PyMem_Calloc(5, n_slots + 1);
    int done;
    if (memo && dict_of && flags) {
        char *residual = flags + 3 * n_slots, *wanted = flags + 4 * n_slots;
        Recording recording = {.memo = memo,
                               .dict_of = dict_of,
                               .typed = flags,
                               .placed = flags + n_slots,
                               .held = flags + 2 * n_slots};
        run->recording = &recording;
        done = record_steps(run, group, &recording, residual);
        run->recording = NULL;
        if (done > 0 && !recording.failed) {
            memo->root = root;
            settle(run->guards, group, &recording, residual, wanted);
            keep_memo(group, memo);
            memo = NULL;
        }
    } else {
        done = run_plain(run, group);
    }
    release_memo(memo);
    PyMem_Free(dict_of);
    PyMem_Free(flags);
    return done;
}

/* -- replaying */

/* Whether a dict whose values are watched one by one now has others: see visit_dict_words of 3.13. */
static int is_reshaped(const Memo *memo, const Link *link) {
    const Word *place = &memo->words.items[link->first + 1], *header = place + 1;
    return word_now(&memo->words, place) != place->expected ||
           word_now(&memo->words, header) != header->expected;
}

/* Looks up again what was looked up in the dict of a word. 1: all as before. */
static int repair(Run *run, const Group *group, Memo *memo, int word) {
    const Guards *guards = run->guards;
    const Link *found = NULL;
    int same = 1;
    for (int i = 0; same > 0 && i < memo->n_links; i++) {
        const Link *link = &memo->links[i];
        if (word < link->first || word >= link->first + link->count) continue;
        const Instruction *at = &guards->instructions[group->order[link->position]];
        int subject = IS_LOAD(at->operation) ? at->source : at->slot;
        if (subject >= 0) fill_slot(run, subject, memo->values[guards->position[subject]]);
        same = take_step(run, at);
        if (same > 0 && IS_LOAD(at->operation)) same = run->slots[at->slot] == memo->values[link->position];
        found = link;
    }
    if (!found || same <= 0) return found ? same : 0;
    if (found->count > 1 && is_reshaped(memo, found)) return 0;
    for (int i = found->first; i < found->first + found->count; i++)
        memo->words.items[i].expected = word_now(&memo->words, &memo->words.items[i]);
    return 1;
}

/* 1: the words are as they were. 0: some are not. */
static int are_unchanged(Run *run, const Group *group, Memo *memo) {
    const Words *words = &memo->words;
    for (int i = 0; i < words->count; i++) {
        if (i + AHEAD < words->count) __builtin_prefetch(word_address(&words->items[i + AHEAD]));
        if (__builtin_expect(word_now(words, &words->items[i]) == words->items[i].expected, 1)) continue;
        int repaired = repair(run, group, memo, i);
        if (repaired <= 0) return repaired;
    }
    return 1;
}

static int run_residual(Run *run, const Group *group, const Memo *memo) {
    for (int i = 0; i < memo->n_needed; i++) {
        int position = memo->needed[i];
        fill_slot(run, run->guards->instructions[group->order[position]].slot, memo->values[position]);
    }
    int done = 1;
    for (int i = 0; done > 0 && i < memo->n_residual; i++)
        done = take_step(run, &run->guards->instructions[group->order[memo->residual[i]]]);
    return done;
}

static Memo *find_memo(Group *group, PyObject *root) {
    for (int tried = 0; tried < group->n_memos; tried++) { /* layers come round in order */
        int at = (group->last + tried) % group->n_memos;
        if (group->memos[at]->root != root) continue;
        group->last = at;
        return group->memos[at];
    }
    return NULL;
}

static int replay(Run *run, Group *group, Memo *memo, int *holds) {
    memo->references++;
    int same = are_unchanged(run, group, memo);
    if (same > 0) {
        group->used++;
        *holds = run_residual(run, group, memo);
    }
    release_memo(memo);
    return same;
}

int run_group(Run *run, Group *group) {
    PyObject *root = NULL;
    int useless =
        group->made > 2 * MOST_MEMOS && group->used < group->made; /* the root is always another */
    if (run->why || !group->steps || useless) return run_plain(run, group);
    if (group->root >= 0) {
        int done = take_step(run, &run->guards->instructions[group->order[0]]);
        if (done <= 0) return done;
        root = run->slots[group->root];
        if (PyTuple_Check(root) || PyDict_Check(root) || PyList_Check(root)) /* made anew for each call */
            return run_plain(run, group);
    }
    int holds = 1;
    Memo *memo = find_memo(group, root);
    int same = memo ? replay(run, group, memo, &holds) : 0;
    if (same) return same < 0 ? -1 : holds;
    return run_recording(run, group, root);
}
