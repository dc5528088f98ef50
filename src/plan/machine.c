/* machine.c - machine files: `key = value unit`, one error a file, with its line. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "plan/machine.h"

enum { MAX_LINE = 256 };

#define TIDE_X(key, unit, required, help) {#key, unit, required, help, offsetof(plan_machine, key)},
const plan_machine_key plan_machine_keys[] = {PLAN_MACHINE_KEYS(TIDE_X)};
#undef TIDE_X
const uint32_t plan_machine_n_keys = sizeof plan_machine_keys / sizeof plan_machine_keys[0];

typedef struct unit_name { int kind; const char *name; double factor; } unit_name;
/* The largest of a kind that leaves a value >= 1 is what is printed. Decimal: 1 GB/s = 1e9 B/s. */
static const unit_name units[] = {
    {UNIT_RATE, "TB/s", 1e12},  {UNIT_RATE, "GB/s", 1e9},       {UNIT_RATE, "MB/s", 1e6},
    {UNIT_RATE, "KB/s", 1e3},   {UNIT_RATE, "B/s", 1},          {UNIT_TIME, "s", 1},
    {UNIT_TIME, "ms", 1e-3},    {UNIT_TIME, "us", 1e-6},        {UNIT_TIME, "ns", 1e-9},
    {UNIT_COUNT, "", 1},        {UNIT_FLOPS, "PFLOP/s", 1e15},  {UNIT_FLOPS, "TFLOP/s", 1e12},
    {UNIT_FLOPS, "GFLOP/s", 1e9},
};
enum { N_UNITS = sizeof units / sizeof units[0] };
static const char *const expected_units[UNIT_KINDS] = {"B/s, KB/s, MB/s, GB/s or TB/s", "s, ms, us or ns", "no unit",
                                                       "GFLOP/s, TFLOP/s or PFLOP/s", "yes or no"};

static char *trimmed(char *s)
{
    char *end;
    while (isspace((unsigned char)*s))
        s++;
    end = s + strlen(s);
    while (end > s && isspace((unsigned char)end[-1]))
        *--end = '\0';
    return s;
}

/* `where`: "FILE:LINE: nic_rate", or a flag. */
static int parse_value(const char *where, const plan_machine_key *key, const char *text, double *out)
{
    char *end;
    const char *rest;
    double value;

    if (key->unit == UNIT_FLAG) {
        bool yes = strcmp(text, "yes") == 0;
        if (!yes && strcmp(text, "no") != 0)
            return tide_fail(TIDE_ERR_ARGUMENT, "%s: '%s', expected yes or no", where, text);
        *out = yes;
        return TIDE_OK;
    }
    value = strtod(text, &end);
    /* strtod takes "nan", "inf" and hexadecimal numbers too */
    if (end == text || !isfinite(value) || strpbrk(text, "xXnN") == text + strspn(text, "+-0"))
        return tide_fail(TIDE_ERR_ARGUMENT, "%s: '%s' is not a number; expected value and unit (%s)", where, text,
                         expected_units[key->unit]);
    rest = end + strspn(end, " \t");
    for (size_t i = 0; i < N_UNITS; i++) {
        if (units[i].kind != key->unit || strcmp(units[i].name, rest) != 0)
            continue;
        if (value < 0 || (value == 0 && key->unit != UNIT_TIME))
            return tide_fail(TIDE_ERR_ARGUMENT, "%s: %g, expected %s", where, value,
                             key->unit == UNIT_TIME ? "a time of 0 or more" : "more than 0");
        if (key->unit == UNIT_COUNT && value != floor(value))
            return tide_fail(TIDE_ERR_ARGUMENT, "%s: %g, expected a whole number", where, value);
        *out = value * units[i].factor;
        return TIDE_OK;
    }
    return tide_fail(TIDE_ERR_ARGUMENT, "%s: unit '%s', expected %s", where, rest, expected_units[key->unit]);
}

int plan_machine_set(plan_machine *m, const char *where, const char *key, const char *text)
{
    for (uint32_t i = 0; i < plan_machine_n_keys; i++)
        if (strcmp(plan_machine_keys[i].name, key) == 0)
            return parse_value(where, &plan_machine_keys[i], text, (double *)((char *)m + plan_machine_keys[i].offset));
    return tide_fail(TIDE_ERR_ARGUMENT, "%s: '%s': no such key", where, key);
}

static int parse_line(const char *file, uint32_t number, char *line, plan_machine *out, uint32_t *seen, bool *named)
{
    char *equals, *name, *value, where[384];

    line[strcspn(line, "#")] = '\0';
    name = trimmed(line);
    if (*name == '\0')
        return TIDE_OK;
    equals = strchr(name, '=');
    if (!equals)
        return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: '%s': no '='; expected key = value unit", file, number, name);
    *equals = '\0';
    name = trimmed(name);
    value = trimmed(equals + 1);
    if (strcmp(name, "name") == 0) {
        if (*named || *value == '\0' || strlen(value) >= sizeof out->name)
            return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: name: %s, expected one line of 1..%d bytes", file, number,
                             *named ? "given twice" : "too short or too long", PLAN_MACHINE_NAME - 1);
        *named = true;
        memcpy(out->name, value, strlen(value) + 1);
        return TIDE_OK;
    }
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) {
        const plan_machine_key *key = &plan_machine_keys[i];
        if (strcmp(key->name, name) != 0)
            continue;
        if (seen[i])
            return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: %s: also in line %u", file, number, name, seen[i]);
        seen[i] = number;
        snprintf(where, sizeof where, "%.300s:%u: %s", file, number, name);
        return plan_machine_set(out, where, name, value);
    }
    return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: '%s': no such key; tide help calibrate lists them", file, number, name);
}

int plan_machine_parse(const char *file, const char *text, size_t bytes, plan_machine *out)
{
    plan_machine m = {.name = ""};
    uint32_t seen[sizeof plan_machine_keys / sizeof plan_machine_keys[0]] = {0}, number = 0;
    bool named = false;

    for (size_t at = 0; at < bytes;) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t length = end ? (size_t)(end - text) - at : bytes - at;
        char line[MAX_LINE];
        int status;

        number++;
        if (length >= sizeof line || memchr(text + at, '\0', length))
            return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: %s", file, number,
                             length >= sizeof line ? "longer than 255 bytes" : "a zero byte; expected text");
        memcpy(line, text + at, length);
        line[length] = '\0';
        status = parse_line(file, number, line, &m, seen, &named);
        if (status != TIDE_OK)
            return status;
        at += length + 1;
    }
    for (uint32_t i = 0; i < plan_machine_n_keys; i++)
        if (!seen[i] && plan_machine_keys[i].required)
            return tide_fail(TIDE_ERR_ARGUMENT, "%s:%u: ends without %s (%s)", file, number, plan_machine_keys[i].name,
                             plan_machine_keys[i].help);
    if (!named)
        snprintf(m.name, sizeof m.name, "%.63s", file);
    *out = m;
    return TIDE_OK;
}

void plan_machine_print(const plan_machine *m, tide_text *out)
{
    tide_text_put(out, "name = %s\n", m->name);
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) {
        const plan_machine_key *key = &plan_machine_keys[i];
        double value = plan_machine_get(m, i);
        const unit_name *best = NULL;
        if (!key->required && value == 0) {
            tide_text_put(out, "# %s: not measured (%s)\n", key->name, key->help);
            continue;
        }
        if (key->unit == UNIT_FLAG) {
            tide_text_put(out, "%s = %s  # %s\n", key->name, value > 0 ? "yes" : "no", key->help);
            continue;
        }
        for (size_t u = 0; u < N_UNITS; u++)
            if (units[u].kind == key->unit && (!best || value < best->factor))
                best = &units[u];
        tide_text_put(out, "%s = %.9g%s%s", key->name, value / best->factor, *best->name ? " " : "", best->name);
        tide_text_put(out, "  # %s\n", key->help);
    }
}

int plan_machine_create(const plan_machine *m, const tide_topology *topology, const tide_group_desc *groups,
                        uint32_t n_groups, const tide_options *options, tide_plan **out)
{
    const plan_rates rates = {m->nic_rate, m->sum_cta_rate, m->land_cta_rate, m->land_rate_cap, m->round_wait};
    const plan_node_rates node = {fmin(m->copy_rate, m->nvlink_rate), m->sum_cta_rate_in_situ};
    return plan_create(topology, groups, n_groups, options, &rates, &node, out);
}
