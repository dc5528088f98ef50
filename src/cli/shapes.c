/* shapes.c - groups of parameters: containers, the shapes file, and the description that the library takes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

void cli_shapes_clear(cli_shapes *s)
{
    for (uint32_t i = 0; i < s->n_params; i++)
        free((char *)s->params[i].name);
    free(s->params);
    free(s->name);
    memset(s, 0, sizeof *s);
}

bool cli_shapes_add(cli_shapes *s, const char *name, int ndim, const int64_t *dims, int shard_dim)
{
    tide_param *p;

    if (s->n_params == s->capacity) {
        uint32_t capacity = s->capacity ? 2 * s->capacity : 16;
        p = realloc(s->params, capacity * sizeof *p);
        if (!p)
            return false;
        s->params = p;
        s->capacity = capacity;
    }
    p = &s->params[s->n_params];
    memset(p, 0, sizeof *p);
    p->name = strdup(name);
    if (!p->name)
        return false;
    p->ndim = ndim;
    p->shard_dim = shard_dim;
    memcpy(p->dims, dims, (size_t)ndim * sizeof *dims);
    s->n_params++;
    return true;
}

int cli_dtype(const char *text, uint32_t *item_size)
{
    static const struct { const char *name; int dtype; } names[] = {
        {"fp32", TIDE_F32}, {"float32", TIDE_F32}, {"bf16", TIDE_BF16}, {"bfloat16", TIDE_BF16},
        {"fp16", TIDE_F16}, {"float16", TIDE_F16},
    };
    int64_t bytes;

    *item_size = 0;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(text, names[i].name) == 0)
            return names[i].dtype;
    if (strncmp(text, "opaque", 6) == 0 && cli_number(text + 6, false, &bytes) && bytes >= 1 && bytes <= UINT32_MAX) {
        *item_size = (uint32_t)bytes;
        return TIDE_OPAQUE;
    }
    return -1;
}

/* One line of a shapes file, already without its comment. `where` is "FILE:LINE". Blank lines are fine. */
static int parse_line(const cli *c, const char *where, char *line, cli_shapes *s)
{
    char *rest = NULL, *name = strtok_r(line, " \t\r\n", &rest), *word;
    int64_t dims[TIDE_MAX_DIMS], shard_dim = 0;
    uint32_t item_size;
    int ndim = 0, dtype;
    bool shard_given = false;

    if (!name)
        return CLI_OK;
    word = strtok_r(NULL, " \t\r\n", &rest);
    if (!word)
        return cli_fail(c, "%s: '%s': no dtype; expected name dtype d0 d1 ... [shard=d]", where, name);
    dtype = cli_dtype(word, &item_size);
    if (dtype < 0)
        return cli_fail(c, "%s: dtype: '%s' is not one of " CLI_DTYPES, where, word);
    if (s->n_params && (dtype != s->dtype || item_size != s->item_size))
        return cli_fail(c, "%s: dtype: '%s' differs from that of the lines before; a group has one", where, word);
    if (s->n_params == TIDE_MAX_PARAMS)
        return cli_fail(c, "%s: more than %d parameters", where, TIDE_MAX_PARAMS);
    while ((word = strtok_r(NULL, " \t\r\n", &rest))) {
        if (shard_given)
            return cli_fail(c, "%s: '%s': nothing may follow shard=", where, word);
        if (strncmp(word, "shard=", 6) == 0) {
            if (!cli_number(word + 6, false, &shard_dim) || shard_dim < 0 || shard_dim >= (ndim ? ndim : 1))
                return cli_fail(c, "%s: shard: '%s' is not a dimension in 0..%d", where, word + 6, ndim ? ndim - 1 : 0);
            shard_given = true;
            continue;
        }
        if (ndim == TIDE_MAX_DIMS)
            return cli_fail(c, "%s: more than %d dimensions", where, TIDE_MAX_DIMS);
        if (!cli_number(word, false, &dims[ndim]) || dims[ndim] < 0)
            return cli_fail(c, "%s: d%d: '%s' is not a size in 0..%lld", where, ndim, word, (long long)INT64_MAX);
        ndim++;
    }
    s->dtype = dtype;
    s->item_size = item_size;
    return cli_shapes_add(s, name, ndim, dims, (int)shard_dim) ? CLI_OK : cli_fail(c, "%s: out of memory", where);
}

static int load_file(const cli *c, const char *path, cli_shapes *s)
{
    char where[300], *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    int code = CLI_OK;
    uint64_t number = 0;
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "r");

    if (!f)
        return cli_fail(c, "--shapes: %s: %s", path, strerror(errno));
    errno = 0;
    while (code == CLI_OK && (n = getline(&line, &capacity, f)) >= 0) {
        snprintf(where, sizeof where, "%.255s:%llu", path, (unsigned long long)++number);
        if (strlen(line) != (size_t)n) {
            code = cli_fail(c, "%s: a zero byte; expected text", where);
            break;
        }
        line[strcspn(line, "#")] = '\0';
        code = parse_line(c, where, line, s);
    }
    if (code == CLI_OK && ferror(f))
        code = cli_fail(c, "--shapes: %s: %s", path, errno ? strerror(errno) : "read failed");
    if (code == CLI_OK && !s->n_params)
        code = cli_fail(c, "--shapes: %s: no parameters", path);
    free(line);
    if (f != stdin)
        fclose(f);
    return code;
}

int cli_shapes_load(const cli *c, cli_shapes *out)
{
    int code = CLI_OK;
    const char *name = c->model ? c->model : c->shapes;

    memset(out, 0, sizeof *out);
    out->dtype = TIDE_BF16;
    if (c->dtype && !c->shapes) {
        out->dtype = cli_dtype(c->dtype, &out->item_size);
        if (out->dtype < 0)
            return cli_fail(c, "--dtype: '%s' is not one of " CLI_DTYPES, c->dtype);
    } else if (c->dtype) {
        return cli_fail(c, "--dtype: the shapes file says it");
    }
    if (!name)
        return CLI_OK;
    out->name = strdup(name);
    if (!out->name)
        return cli_fail(c, "out of memory");
    if (c->shapes) {
        code = load_file(c, c->shapes, out);
    } else {
        const cli_model *model = NULL;
        bool ok = true;
        for (size_t i = 0; i < cli_n_models; i++)
            if (strcmp(cli_models[i].name, c->model) == 0)
                model = &cli_models[i];
        if (!model) {
            code = cli_fail(c, "--model: '%s' is not listed by tide info --models", c->model);
        } else {
            model->add(out, &ok);
            if (!ok)
                code = cli_fail(c, "out of memory");
        }
    }
    if (code != CLI_OK)
        cli_shapes_clear(out);
    return code;
}

int cli_shapes_desc(const cli *c, const cli_shapes *s, tide_group_desc *out)
{
    const tide_group_desc init = TIDE_GROUP_DESC_INIT;
    uint32_t unused;

    *out = init;
    out->name = s->name;
    out->n_params = s->n_params;
    out->params = s->params;
    out->dtype = out->shard_dtype = s->dtype;
    out->item_size = s->item_size;
    out->grad_dtype = s->dtype == TIDE_OPAQUE ? TIDE_NONE : s->dtype;
    if (c->shard_dtype) {
        out->shard_dtype = cli_dtype(c->shard_dtype, &unused);
        if (out->shard_dtype < 0 || (out->shard_dtype == TIDE_OPAQUE) != (s->dtype == TIDE_OPAQUE))
            return cli_fail(c, "--shard-dtype: '%s' is not one of fp32, bf16, fp16", c->shard_dtype);
    }
    if (c->grad_dtype) {
        out->grad_dtype = strcmp(c->grad_dtype, "none") == 0 ? TIDE_NONE : cli_dtype(c->grad_dtype, &unused);
        if (out->grad_dtype < 0 || out->grad_dtype == TIDE_OPAQUE)
            return cli_fail(c, "--grad-dtype: '%s' is not one of fp32, bf16, fp16, none", c->grad_dtype);
    }
    out->input = out->shard_dtype == out->dtype ? TIDE_INPUT_ADOPTED : TIDE_INPUT_ARGUMENT;
    if (c->input) {
        if (strcmp(c->input, "adopted") != 0 && strcmp(c->input, "argument") != 0)
            return cli_fail(c, "--input: '%s' is not one of adopted, argument", c->input);
        out->input = c->input[1] == 'd' ? TIDE_INPUT_ADOPTED : TIDE_INPUT_ARGUMENT;
        if (out->input == TIDE_INPUT_ADOPTED && out->shard_dtype != out->dtype)
            return cli_fail(c, "--input: adopted shards have the dtype that is gathered; drop --shard-dtype");
    }
    if (c->landing) {
        if (strcmp(c->landing, "ring") != 0 && strcmp(c->landing, "private") != 0)
            return cli_fail(c, "--landing: '%s' is not one of ring, private", c->landing);
        out->landing = c->landing[0] == 'r' ? TIDE_LANDING_RING : TIDE_LANDING_PRIVATE;
    }
    return CLI_OK;
}
