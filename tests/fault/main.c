/*
 * main.c - runs the faults and prints a row each.
 *
 *     test_faults                 every case of the table, and a hundred random kills (25 under a sanitizer)
 *     test_faults WORD            the cases whose kind or name contains it
 *     test_faults --kills N SEED  a peer killed N times, at every phase and in set-up
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "../harness/processes.h"
#include "../harness/sanitized.h"
#include "fault.h"

enum { PATIENCE_S = 60, LIMIT_MS = 20000, KILLS = SANITIZED ? 25 : 100 };

static const char *code_name(int code)
{
    static tide_error_info info;
    tide_error_describe(code, &info);
    return info.name;
}

static bool among(const int *codes, int code)
{
    for (int i = 0; i < FAULT_OR && codes[i]; i++)
        if (codes[i] == code)
            return true;
    return !codes[0] && code == TIDE_OK;
}

/* What is not as the row says of this rank; "" when all is. */
static void judge(const fault_row *row, uint32_t rank, const fault_report *r, int how, char *text, size_t room)
{
    bool victim = rank == FAULT_VICTIM, spared = row->alone && !victim;
    double limit = row->limit_ms ? (double)row->limit_ms : LIMIT_MS;

    text[0] = '\0';
    if (victim && (row->what == WHAT_KILL || row->what == WHAT_EXIT)) {
        if (r->ended || (row->what == WHAT_KILL ? !WIFSIGNALED(how) : !WIFEXITED(how)))
            snprintf(text, room, "the fault did not strike");
        return;
    }
    if (!r->began || !r->ended)
        snprintf(text, room, "has not come to its end");
    else if (r->wrong[0])
        snprintf(text, room, "%s", r->wrong);
    else if (r->left[0])
        snprintf(text, room, "left behind: %s", r->left);
    else if (spared ? r->code != TIDE_OK : !among(row->codes, r->code))
        snprintf(text, room, "%s: %s", code_name(r->code), r->text);
    else if (r->code != TIDE_OK && !(victim && row->what == WHAT_STOP) && r->ms > limit)
        snprintf(text, room, "took %.0f ms, expected at most %.0f", r->ms, limit);
    else if (victim && row->what == WHAT_FAIL && r->refused == 0)
        snprintf(text, room, "nothing failed");
    for (int i = 0; i < 2 && !text[0] && r->code != TIDE_OK; i++)
        if (row->texts[i] && !strstr(r->text, row->texts[i]) && !(victim && row->what == WHAT_STOP))
            snprintf(text, room, "'%s' not in: %s", row->texts[i], r->text);
}

/* A case and what came of it; shared memory. */
typedef struct outcome {
    fault_report reports[FAULT_RANKS];
    bool good;
    char complaints[FAULT_RANKS * 320];
} outcome;

static void complain(outcome *o, const char *who, uint32_t rank, const char *text)
{
    size_t used = strlen(o->complaints);
    o->good = false;
    snprintf(o->complaints + used, sizeof o->complaints - used, "  %s %u: %.280s\n", who, rank, text);
}

/* Runs one case. */
static void run(const fault_row *row, outcome *o)
{
    uint32_t n = row->nodes * row->local;
    fault_case c = {row, o->reports};
    int how[FAULT_RANKS] = {0};
    double seconds;

    memset(o, 0, sizeof *o);
    o->good = true;
    if (row->threads)
        seconds = processes_run(1, fault_play_threads, &c, -1, PATIENCE_S, how);
    else
        seconds = processes_run(n, fault_play_process, &c, row->resume_ms ? row->resume_ms : -1, PATIENCE_S, how);
    if (seconds < 0)
        complain(o, "process", n, "could not be started");
    for (uint32_t r = 0; r < n && seconds >= 0; r++) {
        char text[512];
        judge(row, r, &o->reports[r], how[row->threads ? 0 : r], text, sizeof text);
        if (text[0])
            complain(o, "rank", r, text);
    }
}

/* The row of the table that a case prints, with the first rank's error. */
static void print(const fault_row *row, const outcome *o)
{
    const fault_report *r = &o->reports[row->alone ? FAULT_VICTIM : 0];
    double slowest = 0;

    for (uint32_t i = 0; i < row->nodes * row->local; i++)
        if (!(i == FAULT_VICTIM && row->what == WHAT_STOP) && o->reports[i].ms > slowest)
            slowest = o->reports[i].ms;
    printf("%-22s | %s, %u x %u%s | %s | %.0f ms%s\n", row->kind, row->name, row->nodes, row->local,
           row->threads ? " threads" : "", r->code == TIDE_OK ? "goes well" : code_name(r->code), slowest,
           o->good ? "" : " | WRONG");
    if (r->code != TIDE_OK)
        printf("    %s\n", r->text);
    if (row->what == WHAT_FAIL)
        printf("    failed %u times\n", o->reports[FAULT_VICTIM].refused);
    printf("%s", o->complaints);
}

/* Most of a case is waiting for a deadline, so several run at a time. */
enum { LANES = 3 };

/* ---- kills --------------------------------------------------------------------------------------- */

typedef struct killing {
    fault_row row;
    uint32_t places; /* where the victim could have been struck */
    outcome outcome;
} killing;

typedef struct massacre {
    uint32_t n;
    uint64_t seed;
    killing *killings; /* shared memory */
} massacre;

/* The i-th row of the table, again and again, that kills in a call or in set-up. */
static const fault_row *model_of(uint32_t i)
{
    for (uint32_t at = 0;; at++) {
        const fault_row *row = &fault_rows[at % fault_n_rows];
        if (row->what == WHAT_KILL && (row->when == WHEN_ITEM || row->when == WHEN_GATHER) && i-- == 0)
            return row;
    }
}

/* Once without the fault, to see how many places there are; then in one of them. */
static void kill_once(killing *k, uint32_t i, uint64_t seed)
{
    fault_row row = *model_of(i), dry = row;
    const fault_report *victim = &k->outcome.reports[FAULT_VICTIM];
    uint64_t random = (seed * 1000003 + i) * UINT64_C(0x9e3779b97f4a7c15);

    dry.what = WHAT_DIFFER;
    dry.which = DIFFER_NOT;
    dry.codes[0] = TIDE_OK;
    run(&dry, &k->outcome);
    k->row = dry;
    k->places = row.when == WHEN_ITEM ? (uint32_t)victim->items : victim->gathers;
    if (!k->outcome.good || !k->places)
        return;
    if (row.when == WHEN_ITEM && !row.phase) /* a join of what is done already is no item: the last few may not be there */
        k->places -= k->places / 10;
    row.at = 1 + (int64_t)((random >> 20) % k->places);
    k->row = row;
    run(&row, &k->outcome);
}

static void kill_lane(const processes_rank *lane)
{
    const massacre *m = lane->context;
    for (uint32_t i = lane->rank; i < m->n; i += lane->n_ranks)
        kill_once(&m->killings[i], i, m->seed);
}

static uint32_t kills(uint32_t n, uint64_t seed)
{
    massacre m = {n, seed, processes_shared(n * sizeof(killing))};
    uint32_t wrong = 0, set_up = 0, idle = 0, waiting = 0;
    int how[LANES];

    if (!m.killings || processes_run(LANES, kill_lane, &m, 0, (int)n * PATIENCE_S, how) < 0)
        return 1;
    for (uint32_t i = 0; i < n; i++) {
        const killing *k = &m.killings[i];
        bool good = k->outcome.good && k->places && k->row.what == WHAT_KILL, call = k->row.when == WHEN_ITEM;
        if (!good)
            printf("  kill %u: %s, place %lld of %u, %u x %u\n%s", i,
                   !call ? "set-up" : k->row.phase ? k->row.phase : "any item", (long long)k->row.at, k->places,
                   k->row.nodes, k->row.local, k->outcome.complaints);
        wrong += !good;
        set_up += !call;
        for (uint32_t r = 0; call && r < k->row.nodes * k->row.local; r++) {
            if (r == FAULT_VICTIM)
                continue;
            idle += strcmp(k->outcome.reports[r].phase, "idle") == 0;
            waiting += strcmp(k->outcome.reports[r].phase, "idle") != 0;
        }
    }
    printf("kills: %u with seed %llu, %u of them in set-up; of the others' survivors %u named the wait they were in, "
           "%u were idle; %u wrong\n", n, (unsigned long long)seed, set_up, waiting, idle, wrong);
    processes_unshare(m.killings, n * sizeof(killing));
    return wrong;
}

/* ---- the table ----------------------------------------------------------------------------------- */

typedef struct table {
    const char *word;
    outcome *outcomes; /* per row */
} table;

static bool wanted(const fault_row *row, const char *word)
{
    return strstr(row->kind, word) || strstr(row->name, word);
}

static void run_lane(const processes_rank *lane)
{
    const table *t = lane->context;
    for (uint32_t i = lane->rank; i < fault_n_rows; i += lane->n_ranks)
        if (wanted(&fault_rows[i], t->word))
            run(&fault_rows[i], &t->outcomes[i]);
}

static int run_table(const char *word)
{
    table t = {word, processes_shared(fault_n_rows * sizeof(outcome))};
    uint32_t kinds = 0, cases = 0, wrong = 0;
    const char *last = "";
    int how[LANES];

    if (!t.outcomes || processes_run(LANES, run_lane, &t, 0, fault_n_rows * PATIENCE_S, how) < 0)
        return 1;
    for (uint32_t i = 0; i < fault_n_rows; i++) {
        const fault_row *row = &fault_rows[i];
        if (!wanted(row, word))
            continue;
        print(row, &t.outcomes[i]);
        kinds += strcmp(row->kind, last) != 0;
        last = row->kind;
        cases++;
        wrong += !t.outcomes[i].good; /* neither is one that its lane has not come to */
    }
    if (!word[0])
        wrong += kills(KILLS, 1);
    printf("faults: %u kinds, %u cases, %u wrong\n", kinds, cases, wrong);
    processes_unshare(t.outcomes, fault_n_rows * sizeof(outcome));
    return wrong != 0 || cases == 0;
}

int main(int n_arguments, char **arguments)
{
    if (n_arguments == 4 && strcmp(arguments[1], "--kills") == 0)
        return kills((uint32_t)atoi(arguments[2]), strtoull(arguments[3], NULL, 10)) != 0;
    return run_table(n_arguments == 2 ? arguments[1] : "");
}
