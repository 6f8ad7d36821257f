/* Bytes that PyTorch's CPU allocator has live, and the most since the last reset, over all threads of the process.

   PyTorch has no such counter for the CPU, and its profiler follows one thread: what gloo's threads free stays counted
   there for ever. So this library is loaded before the C library (LD_PRELOAD) and counts what libc10 asks for: every
   tensor's storage, through posix_memalign. glibc only. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64, SMALLEST = 4096, SLOTS = 1 << 20 };

extern void *__libc_memalign(size_t alignment, size_t bytes);
extern void __libc_free(void *block);

static struct {
    uintptr_t block;
    size_t bytes;
} table[SLOTS]; /* open addressing, linear probing; a block of 0 is a free slot */
static size_t live_bytes, peak_bytes, num_blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

size_t fleettune_live_bytes(void) { return live_bytes; }
size_t fleettune_peak_bytes(void) { return peak_bytes; }
void fleettune_reset_peak(void) {
    pthread_mutex_lock(&lock);
    peak_bytes = live_bytes;
    pthread_mutex_unlock(&lock);
}

static size_t home(uintptr_t block) { return (size_t)((block >> 6) * 0x9E3779B97F4A7C15ull >> 44) & (SLOTS - 1); }

static void add(uintptr_t block, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (num_blocks < SLOTS / 2) {
        size_t slot = home(block);
        while (table[slot].block) slot = (slot + 1) & (SLOTS - 1);
        table[slot].block = block;
        table[slot].bytes = bytes;
        num_blocks++;
        live_bytes += bytes;
        if (live_bytes > peak_bytes) peak_bytes = live_bytes;
    }
    pthread_mutex_unlock(&lock);
}

static void drop(uintptr_t block) {
    pthread_mutex_lock(&lock);
    size_t slot = home(block);
    while (table[slot].block && table[slot].block != block) slot = (slot + 1) & (SLOTS - 1);
    if (table[slot].block) {
        live_bytes -= table[slot].bytes;
        num_blocks--;
        /* Close the gap: whatever probed past this slot moves up, so that no tombstones gather. */
        size_t hole = slot;
        for (size_t next = (slot + 1) & (SLOTS - 1); table[next].block; next = (next + 1) & (SLOTS - 1)) {
            size_t wanted = home(table[next].block);
            if (((next - wanted) & (SLOTS - 1)) >= ((next - hole) & (SLOTS - 1))) {
                table[hole] = table[next];
                hole = next;
            }
        }
        table[hole].block = 0;
    }
    pthread_mutex_unlock(&lock);
}

/* oneDNN and others ask for aligned memory too; a tensor's comes from libc10. dladdr is slow, and the callers are few:
   the last one of either kind is remembered. */
static int asked_by_tensor(void *caller) {
    static void *volatile tensor_caller, *volatile other_caller;
    if (caller == tensor_caller) return 1;
    if (caller == other_caller) return 0;
    Dl_info place;
    int is_tensor = dladdr(caller, &place) && place.dli_fname && strstr(place.dli_fname, "libc10");
    *(is_tensor ? &tensor_caller : &other_caller) = caller;
    return is_tensor;
}

int posix_memalign(void **block, size_t alignment, size_t bytes) {
    void *made = __libc_memalign(alignment, bytes);
    if (!made) return ENOMEM;
    *block = made;
    if (bytes >= SMALLEST && asked_by_tensor(__builtin_return_address(0))) add((uintptr_t)made, bytes);
    return 0;
}

void free(void *block) {
    /* Most blocks of a process are small or not aligned so, and need no look-up. */
    if (block && (uintptr_t)block % ALIGNMENT == 0 && malloc_usable_size(block) >= SMALLEST) drop((uintptr_t)block);
    __libc_free(block);
}
