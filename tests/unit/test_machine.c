/* Machine files: what is read, what is refused with which line, and that the default rates are those of the paper. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "plan/machine.h"

enum { ROOM = 8192 };
typedef struct page { char text[ROOM]; size_t n; } page;

static int page_write(void *context, const char *text, size_t bytes)
{
    page *p = context;
    if (p->n + bytes >= ROOM)
        return 1;
    memcpy(p->text + p->n, text, bytes);
    p->n += bytes;
    p->text[p->n] = '\0';
    return 0;
}

/* Every key with a value of its own: 1.25, 2.25, ... of the unit; counts are whole. */
static void whole(page *p)
{
    static const char *const unit[UNIT_KINDS] = {"GB/s", "us", "", "TFLOP/s", ""};
    tide_text t = {page_write, p, TIDE_OK};
    p->n = 0;
    tide_text_put(&t, "# all keys\nname = some  machine \n\n");
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) {
        const plan_machine_key *key = &plan_machine_keys[i];
        if (key->unit == UNIT_FLAG)
            tide_text_put(&t, "\t%s= yes # why\n", key->name);
        else
            tide_text_put(&t, "\t%s= %u%s%s%s # why\n", key->name, i + 1, key->unit == UNIT_COUNT ? "" : ".25",
                          i % 2 ? " " : "", unit[key->unit]);
    }
}

static double expected_value(uint32_t i)
{
    static const double factor[UNIT_KINDS] = {1e9, 1e-6, 1, 1e12, 1};
    int unit = plan_machine_keys[i].unit;
    return unit == UNIT_FLAG ? 1 : (i + (unit == UNIT_COUNT ? 1 : 1.25)) * factor[unit];
}

static void every_key_is_read(void **state)
{
    page p, again;
    plan_machine m, n;
    tide_text t = {page_write, &again, TIDE_OK};
    (void)state;
    whole(&p);
    assert_int_equal(plan_machine_parse("f", p.text, p.n, &m), TIDE_OK);
    assert_string_equal(m.name, "some  machine");
    for (uint32_t i = 0; i < plan_machine_n_keys; i++)
        assert_true(plan_machine_get(&m, i) == expected_value(i));
    again.n = 0;
    plan_machine_print(&m, &t);
    assert_int_equal(plan_machine_parse("g", again.text, again.n, &n), TIDE_OK);
    for (uint32_t i = 0; i < plan_machine_n_keys; i++)
        assert_true(plan_machine_get(&n, i) / plan_machine_get(&m, i) - 1 < 1e-9 &&
                    plan_machine_get(&n, i) / plan_machine_get(&m, i) - 1 > -1e-9);
    assert_int_equal(plan_machine_parse("f", p.text, p.n - 1, &m), TIDE_OK); /* no newline at the end */
}

static void bad_lines_are_named(void **state)
{
    static const struct { const char *line, *expected; } bad[] = {
        {"speed = 3 GB/s", "dir/f:4: 'speed': no such key"},
        {"nic_rate 3 GB/s", "dir/f:4: 'nic_rate 3 GB/s': no '='"},
        {"nic_rate = -3 GB/s", "dir/f:4: nic_rate: -3, expected more than 0"},
        {"nic_rate = 0 GB/s", "dir/f:4: nic_rate: 0, expected more than 0"},
        {"nic_rate = 3 Gb/s", "dir/f:4: nic_rate: unit 'Gb/s', expected B/s, KB/s, MB/s, GB/s or TB/s"},
        {"nic_rate = 3", "dir/f:4: nic_rate: unit '', expected B/s"},
        {"nic_rate = 3 us", "dir/f:4: nic_rate: unit 'us', expected B/s"},
        {"nic_rate = fast", "dir/f:4: nic_rate: 'fast' is not a number"},
        {"nic_rate = nan GB/s", "dir/f:4: nic_rate: 'nan GB/s' is not a number"},
        {"nic_rate = inf GB/s", "dir/f:4: nic_rate: 'inf GB/s' is not a number"},
        {"nic_rate = 0x10 GB/s", "dir/f:4: nic_rate: '0x10 GB/s' is not a number"},
        {"nic_rate = 1e999 GB/s", "dir/f:4: nic_rate: '1e999 GB/s' is not a number"},
        {"nic_rate =", "dir/f:4: nic_rate: '' is not a number"},
        {"sms = 3 us", "dir/f:4: sms: unit 'us', expected no unit"},
        {"sms = 1.5", "dir/f:4: sms: 1.5, expected a whole number"},
        {"multicast = 1", "dir/f:4: multicast: '1', expected yes or no"},
        {"device_op = -1 us", "dir/f:4: device_op: -1, expected a time of 0 or more"},
        {"name = twice", "dir/f:4: name: given twice"},
        {"name", "dir/f:4: 'name': no '='"},
    };
    plan_machine m;
    page p;
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[2 * ROOM];
        whole(&p);
        snprintf(text, sizeof text, "#\n#\nname = x\n%s\n%s", bad[i].line, p.text);
        assert_int_equal(plan_machine_parse("dir/f", text, strlen(text), &m), TIDE_ERR_ARGUMENT);
        if (strncmp(tide_last_error(), bad[i].expected, strlen(bad[i].expected)) != 0)
            fail_msg("'%s' gave '%s', expected '%s'", bad[i].line, tide_last_error(), bad[i].expected);
        assert_null(strchr(tide_last_error(), '\n'));
    }
    whole(&p);
    strcat(p.text, "nic_rate = 4 GB/s");
    assert_int_equal(plan_machine_parse("f", p.text, strlen(p.text), &m), TIDE_ERR_ARGUMENT);
    assert_non_null(strstr(tide_last_error(), ": nic_rate: also in line "));
}

static void every_key_is_needed(void **state)
{
    page p;
    (void)state;
    for (uint32_t i = 0; i < plan_machine_n_keys; i++) {
        char text[ROOM], expected[128], *line, *end;
        plan_machine m;
        whole(&p);
        if (!plan_machine_keys[i].required)
            continue;
        snprintf(text, sizeof text, "\n\t%s=", plan_machine_keys[i].name);
        line = strstr(p.text, text);
        assert_non_null(line);
        end = strchr(line + 1, '\n');
        memmove(line, end, strlen(end) + 1);
        assert_int_equal(plan_machine_parse("f", p.text, strlen(p.text), &m), TIDE_ERR_ARGUMENT);
        snprintf(expected, sizeof expected, "f:%u: ends without %s (", plan_machine_n_keys + 2,
                 plan_machine_keys[i].name);
        assert_int_equal(strncmp(tide_last_error(), expected, strlen(expected)), 0);
    }
    {
        plan_machine m;
        assert_int_equal(plan_machine_parse("f", "", 0, &m), TIDE_ERR_ARGUMENT);
        assert_int_equal(plan_machine_parse("f", "a\0b = 1\n", 8, &m), TIDE_ERR_ARGUMENT);
        assert_string_equal(tide_last_error(), "f:1: a zero byte; expected text");
    }
}

/* Whatever bytes come in: a machine or one line about it. */
static void random_bytes_end_in_one_line(void **state)
{
    uint64_t h = 7;
    (void)state;
    for (int i = 0; i < 20000; i++) {
        plan_machine m;
        page p;
        whole(&p);
        for (int k = 0; k < 3; k++) {
            h = tide_fnv_u64(h, (uint64_t)i);
            p.text[h % p.n] = (char)(h >> 32);
        }
        if (plan_machine_parse("f", p.text, p.n, &m) != TIDE_OK) {
            assert_true(strncmp(tide_last_error(), "f:", 2) == 0);
            continue;
        }
        for (uint32_t k = 0; k < plan_machine_n_keys; k++)
            assert_true(plan_machine_get(&m, k) > 0 || plan_machine_keys[k].unit == UNIT_TIME ||
                        plan_machine_keys[k].unit == UNIT_FLAG || !plan_machine_keys[k].required);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_is_read),
        cmocka_unit_test(bad_lines_are_named),
        cmocka_unit_test(every_key_is_needed),
        cmocka_unit_test(random_bytes_end_in_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
