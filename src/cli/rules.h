/*
 * rules.h - what this project relies on in a CUDA driver, as checks over the function table alone.
 *
 * They run on the driver of a GPU machine (`tide driver-rules`) and on the fake driver of the tests, which so behaves
 * as the real one does.
 */
#ifndef TIDE_CLI_RULES_H
#define TIDE_CLI_RULES_H

#include <stdio.h>

#include "fabric/cuda/driver.h"

/* The kernels of the rules: *target = *source + value; and `words` times a value, then, when all CTAs have ended, the value
 * to one more word, released to all (done: as kernel_posts has it). Their PTX is in rules_tools.c; a fake driver needs
 * twins. */
typedef struct rules_kernel { uint64_t target, source, value; } rules_kernel;
#define RULES_KERNEL "tide_rule_add"
typedef struct rules_post { uint64_t data, words, value, done, word; } rules_post;
#define RULES_POST "tide_rule_post"

typedef struct rules_count { int ok, failed, not_run; } rules_count;
/* A line a rule, and a last line. */
rules_count rules_run(const cuda_driver *driver, FILE *out);

#endif
