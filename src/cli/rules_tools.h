/*
 * rules_tools.h - what rules are written with. A rule is a function; what it makes is given back after it, whatever came of
 * it. Streams are blocked by gates: words of host memory that a batch of memory operations waits for, and that we open.
 */
#ifndef TIDE_CLI_RULES_TOOLS_H
#define TIDE_CLI_RULES_TOOLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/rules.h"

enum { PATIENCE_MS = 5000, GRACE_MS = 5, MAX_THINGS = 96, GATES = 64 };

enum thing_kind { A_STREAM, AN_EVENT, A_MODULE, AN_ALLOCATION, A_HOST_ALLOCATION, A_HANDLE, A_RESERVATION, A_MAPPING, AN_FD };
typedef struct thing {
    enum thing_kind kind;
    uint64_t at, bytes;
} thing;

typedef struct rules {
    const cuda_driver *d;
    int n_devices;
    cu_dev device[2];
    cu_context context[2];
    thing things[MAX_THINGS];
    int n_things;
    _Atomic uint64_t *gates; /* host memory, GATES words */
    cu_ptr gates_device;
    int n_gates;
    char why[200];
    const char *note; /* which of two ways the driver has, where both will do */
} rules;

enum outcome { OK, FAILED, NOT_RUN };

#define MUST(condition)                                                                     \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            snprintf(r->why, sizeof r->why, "%s:%d: not so: %s", __FILE__, __LINE__, #condition);   \
            return FAILED;                                                                  \
        }                                                                                   \
    } while (0)
/* A call with its result. */
#define GIVES(call, code)                                                                                      \
    do {                                                                                                       \
        cu_result result_ = (call);                                                                            \
        if (result_ != (code)) {                                                                               \
            snprintf(r->why, sizeof r->why, "%s:%d: %s gives %d, not %d", __FILE__, __LINE__, #call, result_, (code)); \
            return FAILED;                                                                                     \
        }                                                                                                      \
    } while (0)
#define REFUSED(call)                                                                       \
    do {                                                                                    \
        if ((call) == CU_OK) {                                                              \
            snprintf(r->why, sizeof r->why, "%s:%d: %s is accepted", __FILE__, __LINE__, #call);    \
            return FAILED;                                                                  \
        }                                                                                   \
    } while (0)
#define NEEDS(condition, text)                              \
    do {                                                    \
        if (!(condition)) {                                 \
            snprintf(r->why, sizeof r->why, "%s", (text));  \
            return NOT_RUN;                                 \
        }                                                   \
    } while (0)

/* Lists end with a NULL. Rules whose breach may leave a context that is good for nothing stand last. */
typedef struct rule { const char *name; enum outcome (*run)(rules *r); } rule;
extern const rule rules_of_memory[], rules_of_streams[], rules_of_peers[];

uint64_t rules_keep(rules *r, enum thing_kind kind, uint64_t at, uint64_t bytes);
void rules_forget(rules *r, enum thing_kind kind, uint64_t at);
void rules_sleep_ms(int64_t ms);
bool rules_dry(rules *r, cu_stream s);
bool rules_blocked(rules *r, cu_stream s);
void rules_give_back(rules *r);
cu_stream rules_stream(rules *r);
cu_event rules_event(rules *r, unsigned flags);
cu_ptr rules_device_memory(rules *r, size_t bytes);
void *rules_host_memory(rules *r, size_t bytes);
cu_stream_op rules_word_op(int operation, cu_ptr address, uint64_t value, unsigned flags);
cu_result rules_one_word(rules *r, cu_stream s, int operation, cu_ptr address, uint64_t value);
int rules_gate(rules *r, cu_stream s);
void rules_open_gate(rules *r, int g);
bool rules_put(rules *r, cu_ptr to, const void *bytes, size_t n);
bool rules_get(rules *r, void *bytes, cu_ptr from, size_t n);
bool rules_put_word(rules *r, cu_ptr to, uint64_t value);
uint64_t rules_get_word(rules *r, cu_ptr from);
cu_handle rules_handle_on(rules *r, int device, size_t *bytes);
cu_ptr rules_mapping(rules *r, cu_handle h, size_t bytes, int access);
extern const char rules_ptx[]; /* of the kernels */
cu_result rules_load(rules *r, const char *name, cu_function *f);
cu_result rules_load_kernel(rules *r, cu_function *f); /* RULES_KERNEL */
cu_result rules_launch(rules *r, cu_function f, cu_stream s, rules_kernel *args);
enum outcome rules_returns_while_blocked(rules *r, cu_result (*call)(rules *, cu_ptr), cu_ptr at, bool *returned);

#endif
