/*
 * base.h - what every room needs: errors, memory, number formats, digests, clocks.
 */
#ifndef TIDE_BASE_H
#define TIDE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tide/tide.h"

/* Sets the calling thread's error text and returns `code`, so that a function can end with
 *     return tide_fail(TIDE_ERR_ARGUMENT, "nodes: %u is not in 1..1024", nodes);
 */
int tide_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A code that another rank sent as its failure: TIDE_ERR_INTERNAL when that is none. */
int tide_code_from_peer(int code);
/* Hands one line to the user's log hook, if any. level: 0 error, 1 warning, 2 info. */
void tide_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* All heap memory of the library goes through these three, so that tests can fail allocation n and count.
 * calloc semantics: zeroed, NULL (with the error text set) when out of memory or when count * bytes overflows. */
void *tide_calloc(size_t count, size_t bytes);
void *tide_realloc(void *old, size_t count, size_t bytes); /* new memory is not zeroed */
void tide_free(void *pointer);                             /* NULL is fine */
char *tide_strdup(const char *text);                       /* NULL in: "" out; NULL when out of memory */
/* Tests only: fail the n-th allocation from now (1 = next; 0 = never); number made so far; number not yet freed. */
void tide_alloc_fail_at(uint64_t n);
uint64_t tide_alloc_count(void);
uint64_t tide_alloc_live(void);

/* Checked arithmetic on sizes: false on overflow, *out untouched. */
static inline bool tide_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_mul_overflow(a, b, &r) || r > INT64_MAX)
        return false;
    *out = r;
    return true;
}
static inline bool tide_add(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t r;
    if (__builtin_add_overflow(a, b, &r) || r > INT64_MAX)
        return false;
    *out = r;
    return true;
}
static inline uint64_t tide_align_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) / align * align;
}
static inline uint64_t tide_ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }
static inline uint64_t tide_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t tide_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Bytes of one item; 0 for TIDE_OPAQUE and TIDE_NONE. */
uint32_t tide_dtype_bytes(int dtype);
const char *tide_dtype_name(int dtype); /* "bf16" */

/* bf16 <-> fp32, round to nearest even, NaN stays NaN (quiet). */
static inline float tide_bf16_to_f32(uint16_t h)
{
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}
static inline uint16_t tide_f32_to_bf16(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
float tide_f16_to_f32(uint16_t h);
uint16_t tide_f32_to_f16(float f);

/* 64-bit FNV-1a. Start from TIDE_FNV_BASIS; integers are fed little-endian, so digests agree between machines. */
#define TIDE_FNV_BASIS UINT64_C(0xcbf29ce484222325)
uint64_t tide_fnv_bytes(uint64_t h, const void *data, size_t bytes);
uint64_t tide_fnv_u64(uint64_t h, uint64_t value);

/* Monotonic clock. */
int64_t tide_now_ns(void);

/* A growing string, written through a tide_write_fn or kept. All calls are no-ops after the first failure. */
typedef struct tide_text {
    tide_write_fn write;
    void *context;
    int status; /* TIDE_OK, or the first failure */
} tide_text;
void tide_text_put(tide_text *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
void tide_text_json_string(tide_text *t, const char *s); /* quoted and escaped */

/* Grows *items (element size `bytes`) so that at least `need` fit; *capacity in elements. */
int tide_grow(void *items, uint32_t *capacity, uint64_t need, size_t bytes);

/* All of a small file that is open for reading, as new memory that ends with a zero byte (tide_free). Errors begin with "what: name: ":
 * TIDE_ERR_SYSTEM, TIDE_ERR_ARGUMENT (longer than `most` bytes), TIDE_ERR_MEMORY. */
int tide_read_text(FILE *file, const char *what, const char *name, size_t most, char **text, size_t *bytes);

/* A hash table from 64-bit keys, none of them 0, to two words. All zeros: empty; tide_free(entries) ends it. */
typedef struct tide_map_entry { uint64_t key; uint32_t value[2]; } tide_map_entry;
typedef struct tide_map { tide_map_entry *entries; uint32_t n, size; } tide_map;
/* The words of `key`, zeros when it is new; valid until the next call. NULL when out of memory. */
uint32_t *tide_map_at(tide_map *m, uint64_t key);

/* Validates every knob of `options` against the table; names the knob. NULL is fine (defaults). */
int tide_options_check(const tide_options *options);

#endif
