/* memory.c - the library's heap, with a counter and a failure point for tests. */
#include <stdatomic.h>
#include <stdlib.h>

#include "base/base.h"

static _Atomic uint64_t alloc_count;
static _Atomic uint64_t alloc_fail_at; /* absolute count at which to fail; 0 = never */
static _Atomic uint64_t alloc_live;

void tide_alloc_fail_at(uint64_t n)
{
    alloc_fail_at = n ? alloc_count + n : 0;
}

uint64_t tide_alloc_count(void)
{
    return alloc_count;
}

uint64_t tide_alloc_live(void)
{
    return alloc_live;
}

static bool may_allocate(size_t count, size_t bytes)
{
    uint64_t n = ++alloc_count;
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total) || total > (size_t)INT64_MAX) {
        tide_fail(TIDE_ERR_MEMORY, "cannot allocate %zu x %zu bytes: the size overflows", count, bytes);
        return false;
    }
    if (alloc_fail_at == n) {
        tide_fail(TIDE_ERR_MEMORY, "cannot allocate %zu bytes: failure injected", total);
        return false;
    }
    return true;
}

void *tide_calloc(size_t count, size_t bytes)
{
    void *p;
    if (!may_allocate(count, bytes))
        return NULL;
    p = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!p)
        tide_fail(TIDE_ERR_MEMORY, "cannot allocate %zu bytes", count * bytes);
    else
        alloc_live++;
    return p;
}

void *tide_realloc(void *old, size_t count, size_t bytes)
{
    void *p;
    size_t total = count * bytes;
    if (!may_allocate(count, bytes))
        return NULL;
    p = realloc(old, total > 0 ? total : 1);
    if (!p)
        tide_fail(TIDE_ERR_MEMORY, "cannot allocate %zu bytes", count * bytes);
    else if (!old)
        alloc_live++;
    return p;
}

void tide_free(void *pointer)
{
    if (pointer)
        alloc_live--;
    free(pointer);
}

char *tide_strdup(const char *text)
{
    size_t n = text ? strlen(text) : 0;
    char *copy = tide_calloc(n + 1, 1);
    if (copy && n)
        memcpy(copy, text, n);
    return copy;
}

int tide_grow(void *items, uint32_t *capacity, uint64_t need, size_t bytes)
{
    void *old, *fresh;
    uint64_t want;
    if (need <= *capacity)
        return TIDE_OK;
    want = tide_max_u64(need, tide_max_u64(16, (uint64_t)*capacity * 2));
    if (want > UINT32_MAX)
        return tide_fail(TIDE_ERR_MEMORY, "cannot grow a list to %llu items", (unsigned long long)want);
    memcpy(&old, items, sizeof old);
    fresh = tide_realloc(old, want, bytes);
    if (!fresh)
        return TIDE_ERR_MEMORY;
    memcpy(items, &fresh, sizeof fresh);
    *capacity = (uint32_t)want;
    return TIDE_OK;
}

/* ---- map ----------------------------------------------------------------------------------------- */

/* Where `key` is or would be: open addressing, never full. */
static tide_map_entry *probe(tide_map_entry *entries, uint32_t size, uint64_t key)
{
    uint64_t h = key * UINT64_C(0x9e3779b97f4a7c15);
    uint32_t at = (uint32_t)(h ^ h >> 32) & (size - 1);
    while (entries[at].key && entries[at].key != key)
        at = (at + 1) & (size - 1);
    return &entries[at];
}

uint32_t *tide_map_at(tide_map *m, uint64_t key)
{
    tide_map_entry *e;

    if (2 * (uint64_t)m->n >= m->size) {
        uint32_t size = m->size ? 2 * m->size : 16;
        tide_map_entry *entries = tide_calloc(size, sizeof *entries);
        if (!entries)
            return NULL;
        for (uint32_t i = 0; i < m->size; i++)
            if (m->entries[i].key)
                *probe(entries, size, m->entries[i].key) = m->entries[i];
        tide_free(m->entries);
        m->entries = entries;
        m->size = size;
    }
    e = probe(m->entries, m->size, key);
    m->n += !e->key;
    e->key = key;
    return e->value;
}
