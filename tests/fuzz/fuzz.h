/*
 * fuzz.h - what the fuzz targets share. A target is one file with LLVMFuzzerTestOneInput: under clang's libFuzzer
 * (`make fuzz`) it is fed mutated inputs, with replay.c (`make unit`) the inputs kept in corpus/.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A property that every input has to keep. */
#define HOLDS(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);      \
            abort();                                                             \
        }                                                                        \
    } while (0)

/* Bytes of the input, taken one after the other; zeros when it is used up. */
typedef struct fuzz_input {
    const uint8_t *data;
    size_t size;
} fuzz_input;

static inline uint8_t fuzz_byte(fuzz_input *in)
{
    uint8_t b = in->size ? *in->data : 0;
    if (in->size) {
        in->data++;
        in->size--;
    }
    return b;
}

static inline uint64_t fuzz_u64(fuzz_input *in)
{
    uint64_t x = 0;
    for (int i = 0; i < 8; i++)
        x = x << 8 | fuzz_byte(in);
    return x;
}

#endif
