/* util.c - knobs, number formats, digests, clock, text. */
#include <errno.h>
#include <time.h>

#include "base/base.h"

static const tide_knob_info knob_table[] = {
#define TIDE_X(name, dflt, lo, hi, help) {#name, dflt, lo, hi, help},
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
};
static const size_t knob_offset[] = {
#define TIDE_X(name, dflt, lo, hi, help) offsetof(tide_options, name),
    TIDE_KNOBS(TIDE_X)
#undef TIDE_X
};
enum { N_KNOBS = sizeof knob_table / sizeof knob_table[0] };

int tide_knob_describe(size_t index, tide_knob_info *out)
{
    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected a tide_knob_info");
    if (index >= N_KNOBS)
        return tide_fail(TIDE_ERR_END, "index: %zu is not in 0..%d", index, N_KNOBS - 1);
    *out = knob_table[index];
    return TIDE_OK;
}

static int knob_check(const tide_knob_info *knob, int64_t value)
{
    if (value == TIDE_AUTO || (value >= knob->minimum && value <= knob->maximum))
        return TIDE_OK;
    return tide_fail(TIDE_ERR_ARGUMENT, "%s: %lld is not in %lld..%lld", knob->name, (long long)value,
                     (long long)knob->minimum, (long long)knob->maximum);
}

int tide_options_set(tide_options *options, const char *name, int64_t value)
{
    if (!options || options->size != sizeof *options)
        return tide_fail(TIDE_ERR_ARGUMENT, "options: %s, expected a tide_options from TIDE_OPTIONS_INIT",
                         options ? "wrong size" : "NULL");
    if (!name)
        return tide_fail(TIDE_ERR_ARGUMENT, "name: NULL, expected a knob's name");
    for (size_t i = 0; i < N_KNOBS; i++) {
        if (strcmp(knob_table[i].name, name) == 0) {
            int status = knob_check(&knob_table[i], value);
            if (status == TIDE_OK)
                memcpy((char *)options + knob_offset[i], &value, sizeof value);
            return status;
        }
    }
    return tide_fail(TIDE_ERR_ARGUMENT, "name: '%s' is not a knob", name);
}

int tide_options_check(const tide_options *options)
{
    if (!options)
        return TIDE_OK;
    if (options->size != sizeof *options)
        return tide_fail(TIDE_ERR_ARGUMENT, "options.size: %zu, expected %zu", options->size, sizeof *options);
    for (size_t i = 0; i < N_KNOBS; i++) {
        int64_t value;
        int status;
        memcpy(&value, (const char *)options + knob_offset[i], sizeof value);
        status = knob_check(&knob_table[i], value);
        if (status != TIDE_OK)
            return status;
    }
    return TIDE_OK;
}

uint32_t tide_dtype_bytes(int dtype)
{
    switch (dtype) {
    case TIDE_F32:
        return 4;
    case TIDE_BF16:
    case TIDE_F16:
        return 2;
    default:
        return 0;
    }
}

const char *tide_dtype_name(int dtype)
{
    static const char *const names[] = {"fp32", "bf16", "fp16", "opaque", "none"};
    return dtype >= 0 && dtype <= TIDE_NONE ? names[dtype] : "invalid";
}

float tide_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1fu, mantissa = h & 0x3ffu, bits;
    float f;
    if (exponent == 0x1f) {
        bits = sign | 0x7f800000u | mantissa << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else if (mantissa) { /* subnormal: shift the leading one into place */
        uint32_t shift = (uint32_t)__builtin_clz(mantissa) - 21;
        bits = sign | (113 - shift) << 23 | (mantissa << shift & 0x3ffu) << 13;
    } else {
        bits = sign;
    }
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* value * 2^-shift, rounded to nearest even; 0 < shift < 32 */
static uint32_t shift_right_even(uint32_t value, uint32_t shift)
{
    uint32_t half = 1u << (shift - 1), rest = value & ((1u << shift) - 1), result = value >> shift;
    return result + (rest > half || (rest == half && (result & 1u)));
}

uint16_t tide_f32_to_f16(float f)
{
    uint32_t bits, sign, magnitude;
    memcpy(&bits, &f, sizeof bits);
    sign = bits >> 16 & 0x8000u;
    magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) /* rounds past the largest finite value */
        return (uint16_t)(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) /* normal */
        return (uint16_t)(sign | shift_right_even(magnitude - 0x38000000u, 13));
    if (magnitude < 0x33000000u) /* below half of the smallest subnormal */
        return (uint16_t)sign;
    return (uint16_t)(sign | shift_right_even((magnitude & 0x7fffffu) | 0x800000u, 126 - (magnitude >> 23)));
}

uint64_t tide_fnv_bytes(uint64_t h, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++)
        h = (h ^ p[i]) * UINT64_C(0x100000001b3);
    return h;
}

uint64_t tide_fnv_u64(uint64_t h, uint64_t value)
{
    for (int i = 0; i < 8; i++)
        h = (h ^ (value >> (8 * i) & 0xff)) * UINT64_C(0x100000001b3);
    return h;
}

int64_t tide_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void tide_text_put(tide_text *t, const char *format, ...)
{
    char small[512], *text = small;
    va_list args;
    int n;

    if (t->status != TIDE_OK)
        return;
    va_start(args, format);
    n = vsnprintf(small, sizeof small, format, args);
    va_end(args);
    if (n < 0) {
        t->status = tide_fail(TIDE_ERR_INTERNAL, "a line could not be formatted");
        return;
    }
    if ((size_t)n >= sizeof small) {
        text = tide_calloc((size_t)n + 1, 1);
        if (!text) {
            t->status = TIDE_ERR_MEMORY;
            return;
        }
        va_start(args, format);
        vsnprintf(text, (size_t)n + 1, format, args);
        va_end(args);
    }
    if (t->write(t->context, text, (size_t)n) != 0)
        t->status = tide_fail(TIDE_ERR_SYSTEM, "write: the caller's function refused the text");
    if (text != small)
        tide_free(text);
}

void tide_text_json_string(tide_text *t, const char *s)
{
    tide_text_put(t, "\"");
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c == '"' || c == '\\')
            tide_text_put(t, "\\%c", c);
        else if (c < 0x20)
            tide_text_put(t, "\\u%04x", c);
        else
            tide_text_put(t, "%c", c);
    }
    tide_text_put(t, "\"");
}

int tide_read_text(FILE *file, const char *what, const char *name, size_t most, char **text, size_t *bytes)
{
    char *all = tide_calloc(most + 2, 1); /* a byte more than may be there, and the zero */
    size_t n;
    int status = TIDE_OK;

    if (!all)
        return TIDE_ERR_MEMORY;
    errno = 0;
    n = fread(all, 1, most + 1, file);
    if (ferror(file))
        status = tide_fail(TIDE_ERR_SYSTEM, "%s: %s: %s", what, name, strerror(errno));
    else if (n > most)
        status = tide_fail(TIDE_ERR_ARGUMENT, "%s: %s: longer than %zu bytes", what, name, most);
    if (status != TIDE_OK) {
        tide_free(all);
        return status;
    }
    *text = all;
    *bytes = n;
    return TIDE_OK;
}
