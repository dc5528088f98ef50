/* error.c - error table, the thread's last error, the log hook. */
#include <pthread.h>
#include <stdio.h>

#include "base/base.h"

#define TIDE_STR2(x) #x
#define TIDE_STR(x) TIDE_STR2(x)

static const tide_error_info error_table[] = {
#define TIDE_X(name, code, message, affected) {code, "TIDE_" #name, message, affected},
    TIDE_ERRORS(TIDE_X)
#undef TIDE_X
};

static _Thread_local char last_error[512];

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static tide_log_fn log_fn;
static void *log_context;

const char *tide_version(void)
{
    return TIDE_STR(TIDE_VERSION_MAJOR) "." TIDE_STR(TIDE_VERSION_MINOR) "." TIDE_STR(TIDE_VERSION_PATCH);
}

int tide_fail(int code, const char *format, ...)
{
    char text[sizeof last_error]; /* the arguments may contain the last one */
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    memcpy(last_error, text, strlen(text) + 1);
    return code;
}

int tide_code_from_peer(int code)
{
    for (size_t i = 0; i < sizeof error_table / sizeof error_table[0]; i++)
        if (error_table[i].code == code && code != TIDE_OK)
            return code;
    return TIDE_ERR_INTERNAL;
}

const char *tide_last_error(void)
{
    return last_error;
}

int tide_error_describe(int code, tide_error_info *out)
{
    if (!out)
        return tide_fail(TIDE_ERR_ARGUMENT, "out: NULL, expected a tide_error_info");
    for (size_t i = 0; i < sizeof error_table / sizeof error_table[0]; i++) {
        if (error_table[i].code == code) {
            *out = error_table[i];
            return TIDE_OK;
        }
    }
    return tide_fail(TIDE_ERR_ARGUMENT, "code: %d is not in the error table", code);
}

void tide_log_set(tide_log_fn fn, void *context)
{
    pthread_mutex_lock(&log_lock);
    log_fn = fn;
    log_context = context;
    pthread_mutex_unlock(&log_lock);
}

void tide_log(int level, const char *format, ...)
{
    char line[512];
    tide_log_fn fn;
    void *context;
    va_list args;

    pthread_mutex_lock(&log_lock);
    fn = log_fn;
    context = log_context;
    pthread_mutex_unlock(&log_lock);
    if (!fn)
        return;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fn(context, level, line);
}
