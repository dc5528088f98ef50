/* work.c - running the streams: workers, waiting callers, the choice among streams, deadlines. */
#include <time.h>

#include "fabric/host/host.h"

/* ---- conditions ------------------------------------------------------------------------------ */

static bool post_present(const host_item *item, uint32_t i)
{
    if (item->kind == ITEM_WAIT) {
        const fab_post *posts = item->list;
        return atomic_load(&posts[i].word->value) >= item->value;
    } else {
        const fab_rail_post *posts = item->list;
        _Atomic uint64_t *consumed;
        fab_rail_word *word = host_rail_own_word(item->object, &posts[i], &consumed);
        return atomic_load(&word->value) >= atomic_load_explicit(consumed, memory_order_relaxed) + posts[i].count;
    }
}

static uint32_t post_rank(const host_item *item, uint32_t i)
{
    return item->kind == ITEM_WAIT ? ((const fab_post *)item->list)[i].rank
                                   : ((const fab_rail_post *)item->list)[i].peer;
}

int64_t host_missing(host_device *d, const host_item *item)
{
    (void)d;
    for (uint32_t i = 0; i < item->n; i++)
        if (!post_present(item, i))
            return post_rank(item, i);
    return -1;
}

/* Whether the head item can run now; conditions never become false again. The stream is idle or the caller runs it. */
static bool item_ready(host_device *d, host_stream *s, const host_item *item)
{
    const fab_event *e = item->object;
    switch (item->kind) {
    case ITEM_WAIT:
    case ITEM_RAIL_WAIT:
        while (s->satisfied < item->n && post_present(item, s->satisfied))
            s->satisfied++;
        if (s->satisfied == item->n)
            return true;
        atomic_store_explicit(&d->own->page.crumb_call, item->number, memory_order_relaxed);
        atomic_store_explicit(&d->own->page.crumb_op, item->where->op, memory_order_relaxed);
        return false;
    case ITEM_JOIN:
        return atomic_load(&e->done) >= item->value;
    case ITEM_RECORD: /* far ahead of a record on another stream */
        return item->value - atomic_load(&e->done) <= HOST_OUT_OF_ORDER;
    default:
        return true;
    }
}

/* ---- execution ------------------------------------------------------------------------------- */

void host_room_made(host_device *d)
{
    if (atomic_load(&d->room_waiters)) {
        atomic_fetch_add(&d->room, 1);
        fab_futex_wake(&d->room);
    }
}

void host_event_complete(fab_event *e, uint64_t record)
{
    uint64_t done = atomic_load_explicit(&e->done, memory_order_relaxed);
    e->out_of_order |= UINT64_C(1) << (record - done - 1);
    while (e->out_of_order & 1) {
        e->out_of_order >>= 1;
        done++;
    }
    atomic_store(&e->done, done);
}

static void check_tags(host_device *d, const host_item *item)
{
    for (uint32_t i = 0; i < item->n; i++) {
        uint64_t expected = item->value, value, tag;
        if (item->kind == ITEM_WAIT) {
            fab_word *word = ((const fab_post *)item->list)[i].word;
            value = atomic_load(&word->value);
            tag = atomic_load(&word->tag);
        } else {
            const fab_rail_post *post = (const fab_rail_post *)item->list + i;
            _Atomic uint64_t *consumed;
            fab_rail_word *word = host_rail_own_word(item->object, post, &consumed);
            value = atomic_load(&word->value);
            tag = atomic_load(&word->tag);
            expected = atomic_load_explicit(consumed, memory_order_relaxed) + post->count;
        }
        if ((value == expected || item->check == FAB_CHECK_ANY) && tag != item->tag)
            host_fail_wait(d, TIDE_ERR_MISMATCH, item, post_rank(item, i));
    }
}

static void execute(host_device *d, const host_item *item)
{
    switch (item->kind) {
    case ITEM_COPY:
        host_run_copy(item->list, item->call);
        break;
    case ITEM_REDUCE:
        host_run_reduce(item->list, item->call);
        break;
    case ITEM_SIGNAL: {
        const fab_post *posts = item->list;
        for (uint32_t i = 0; i < item->n; i++) {
            atomic_store_explicit(&posts[i].word->tag, item->tag, memory_order_relaxed);
            atomic_store(&posts[i].word->value, item->value);
            host_ring(host_page(d, posts[i].rank));
        }
        break;
    }
    case ITEM_WAIT:
        if (item->check)
            check_tags(d, item);
        break;
    case ITEM_PUT: {
        fab_rail *r = item->object;
        const fab_put *puts = item->list;
        for (uint32_t i = 0; i < item->n; i++)
            host_rail_put(r, &puts[i], item);
        break;
    }
    case ITEM_RAIL_SIGNAL: {
        fab_rail *r = item->object;
        const fab_rail_post *posts = item->list;
        for (uint32_t i = 0; i < item->n; i++)
            host_rail_signal(r, &posts[i], item);
        break;
    }
    case ITEM_RAIL_WAIT: {
        const fab_rail_post *posts = item->list;
        if (item->check)
            check_tags(d, item);
        for (uint32_t i = 0; i < item->n; i++) {
            _Atomic uint64_t *consumed;
            host_rail_own_word(item->object, &posts[i], &consumed);
            atomic_fetch_add_explicit(consumed, posts[i].count, memory_order_relaxed);
        }
        break;
    }
    case ITEM_RECORD:
        pthread_mutex_lock(&d->lock);
        host_event_complete(item->object, item->value);
        pthread_mutex_unlock(&d->lock);
        host_ring_caller(d->own);
        if (d->n_workers > 1)
            host_ring(d->own);
        break;
    default: /* JOIN: done by being ready */
        break;
    }
}

/* What takes time in proportion to bytes. */
static bool is_heavy(const host_item *item)
{
    return item->kind == ITEM_COPY || item->kind == ITEM_REDUCE || item->kind == ITEM_PUT;
}

/* Runs s until its head has to wait; light: also until it is heavy; once: one item. After a failure items are dropped:
 * only what others count on (references) is settled. */
static void run_stream(host_device *d, host_stream *s, bool light, bool once)
{
    do {
        uint64_t head = atomic_load_explicit(&s->head, memory_order_relaxed);
        const host_item *item;
        if (head == atomic_load_explicit(&s->tail, memory_order_acquire))
            return;
        item = &s->items[head & (s->capacity - 1)];
        if (!host_has_failed(d)) {
            if ((light && is_heavy(item)) || !item_ready(d, s, item))
                return;
            if (d->on_item)
                d->on_item(d->on_item_context, item->where ? item->where->phase : NULL);
            execute(d, item);
        }
        if (item->call)
            atomic_fetch_sub(&item->call->refs, 1);
        s->satisfied = 0;
        atomic_store(&s->head, head + 1);
        host_room_made(d);
    } while (!once);
}

static bool can_run(host_device *d, host_stream *s, bool light)
{
    uint64_t head = atomic_load_explicit(&s->head, memory_order_relaxed);
    const host_item *item = &s->items[head & (s->capacity - 1)];
    if (s->busy || head == atomic_load(&s->tail))
        return false;
    return host_has_failed(d) || (!(light && is_heavy(item)) && item_ready(d, s, item));
}

static uint64_t next_random(uint64_t *state)
{
    uint64_t x = *state;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return *state = x;
}

enum { SAME_PRIORITY = 8 }; /* items a priority lasts, on average */

/* Device lock held. In turn: the search begins behind the stream chosen last, so that a busy pair cannot starve a
 * third. With a seed: the highest of priorities that are drawn anew now and then, so that a stream may be left behind
 * for long, or run far ahead. */
static host_stream *choose(host_device *d, bool light)
{
    host_stream *chosen = NULL, *wrapped = NULL;
    uint32_t index = 0, wrapped_index = 0;

    for (fab_queue *q = d->queues; q; q = q->next) {
        for (uint32_t i = 0; i < q->n_streams; i++, index++) {
            host_stream *s = &q->streams[i];
            if (!can_run(d, s, light))
                continue;
            if (d->seed) {
                if (!s->priority)
                    s->priority = next_random(&d->seed);
                if (!chosen || s->priority > chosen->priority)
                    chosen = s;
            } else if (index >= d->turn) {
                d->turn = index + 1;
                return s;
            } else if (!wrapped) {
                wrapped = s;
                wrapped_index = index;
            }
        }
    }
    if (chosen && next_random(&d->seed) % SAME_PRIORITY == 0)
        chosen->priority = next_random(&d->seed);
    if (wrapped) {
        d->turn = wrapped_index + 1;
        return wrapped;
    }
    return chosen;
}

/* Device lock held, and given up while a stream runs. False: nothing could run. */
static bool make_progress(host_device *d, bool light)
{
    host_stream *s;
    bool once;
    host_adopt_poison(d);
    s = choose(d, light);
    if (!s)
        return false;
    once = d->seed != 0;
    s->busy = 1;
    pthread_mutex_unlock(&d->lock);
    run_stream(d, s, light, once);
    pthread_mutex_lock(&d->lock);
    s->busy = 0;
    host_room_made(d);
    host_ring_caller(d->own); /* it may wait for this stream to stand idle */
    return true;
}

/* ---- sleeping -------------------------------------------------------------------------------- */

/* Nanoseconds until the first deadline of a blocked wait; -1: none. A wait past its deadline fails the device: best one
 * for another rank, since waits for oneself only follow from those. Device lock held. */
static int64_t next_deadline(host_device *d)
{
    const host_item *late = NULL;
    int64_t now = 0, first = -1, whom = -1;
    for (fab_queue *q = d->queues; q; q = q->next) {
        for (uint32_t i = 0; i < q->n_streams; i++) {
            host_stream *s = &q->streams[i];
            uint64_t head = atomic_load_explicit(&s->head, memory_order_relaxed);
            const host_item *item = &s->items[head & (s->capacity - 1)];
            int64_t left, peer;
            if (s->busy || head == atomic_load(&s->tail) || (item->kind != ITEM_WAIT && item->kind != ITEM_RAIL_WAIT))
                continue;
            now = now ? now : tide_now_ns();
            left = item->enqueued + d->peers.deadline_ns - now;
            if (left <= 0 && (peer = host_missing(d, item)) >= 0 && (!late || whom == d->face.rank)) {
                late = item;
                whom = peer;
            }
            if (first < 0 || left < first)
                first = left < 0 ? 0 : left;
        }
    }
    if (late)
        host_fail_wait(d, TIDE_ERR_DEADLINE, late, (uint32_t)whom);
    return first;
}

static bool any_can_run(host_device *d)
{
    for (fab_queue *q = d->queues; q; q = q->next)
        for (uint32_t i = 0; i < q->n_streams; i++)
            if (can_run(d, &q->streams[i], false))
                return true;
    return false;
}

static bool all_idle(const fab_queue *q)
{
    for (uint32_t i = 0; i < q->n_streams; i++)
        if (q->streams[i].busy || atomic_load(&q->streams[i].head) != atomic_load(&q->streams[i].tail))
            return false;
    return true;
}

/* What a waiting caller waits for: a record of an event, or (event NULL) a queue without work. */
typedef struct host_goal {
    const fab_queue *queue;
    const fab_event *event;
    uint64_t record;
} host_goal;

static bool reached(const host_goal *g)
{
    return g->event ? atomic_load(&g->event->done) >= g->record : all_idle(g->queue);
}

static bool anything_queued(const host_device *d)
{
    for (const fab_queue *q = d->queues; q; q = q->next)
        for (uint32_t i = 0; i < q->n_streams; i++)
            if (atomic_load(&q->streams[i].head) != atomic_load(&q->streams[i].tail))
                return true;
    return false;
}

/* Sleeps until this thread's bell rings; the second look at the queues comes after the announcement (see host.h).
 * works: this thread runs streams. goal: NULL for a worker. Device lock held, and given up while asleep. Nobody sleeps
 * longer than the deadline: what is enqueued meanwhile expires later than that. */
static void sleep_on(host_device *d, enum host_bell bell, bool works, const host_goal *goal)
{
    uint32_t bit = bell == BELL_WORKER ? SLEEPER_WORKER : SLEEPER_CALLER;
    uint32_t seen = atomic_load(&d->own->bell[bell]);
    int64_t timeout = d->peers.deadline_ns, left;

    /* a lone worker without work does not mind the peers' signals: the next submit says when it has to */
    if (bell == BELL_CALLER || d->n_workers > 1 || anything_queued(d))
        atomic_fetch_or(&d->own->sleepers, bit);
    if (d->stop || (works && any_can_run(d)) || (goal && (reached(goal) || host_has_failed(d))) ||
        (!host_has_failed(d) && atomic_load(&d->own->page.poison))) {
        if (d->n_workers == 1)
            atomic_fetch_and(&d->own->sleepers, ~bit);
        return;
    }
    left = host_has_failed(d) ? -1 : next_deadline(d);
    if (left == 0)
        return;
    if (left > 0)
        timeout = (int64_t)tide_min_u64((uint64_t)left, (uint64_t)timeout);
    d->workers_asleep += bell == BELL_WORKER;
    pthread_mutex_unlock(&d->lock);
    fab_futex_wait(&d->own->bell[bell], seen, timeout);
    pthread_mutex_lock(&d->lock);
    d->workers_asleep -= bell == BELL_WORKER;
}

void *host_worker(void *argument)
{
    host_device *d = argument;
    pthread_mutex_lock(&d->lock);
    while (!d->stop)
        if (!make_progress(d, false))
            sleep_on(d, BELL_WORKER, true, NULL);
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* The submitting caller posts what only waits for being posted; then most calls wait for the peers, and instead of
 * being woken now, the worker is put down for the peers' signals. Work on bytes is the worker's: the caller has its own
 * to do. */
void host_start(host_device *d)
{
    if (d->n_workers > 1) {
        host_ring(d->own);
        return;
    }
    pthread_mutex_lock(&d->lock);
    while (make_progress(d, true))
        continue;
    if (d->workers_asleep && anything_queued(d)) {
        atomic_fetch_or(&d->own->sleepers, SLEEPER_WORKER);
        if (any_can_run(d)) /* looked at after the announcement */
            host_ring(d->own);
    }
    pthread_mutex_unlock(&d->lock);
}

/* The caller runs streams itself meanwhile, when it is the only one and there is one worker; with more workers it
 * leaves the work to them. */
static int wait_until(host_device *d, const host_goal *goal)
{
    bool help;

    pthread_mutex_lock(&d->lock);
    help = d->n_workers == 1 && d->helpers == 0;
    if (help) {
        d->helpers = 1;
        atomic_fetch_or(&d->own->sleepers, HELPER);
    }
    while (!host_has_failed(d) && !reached(goal)) {
        if (help && make_progress(d, false))
            continue;
        host_adopt_poison(d);
        sleep_on(d, BELL_CALLER, help, goal);
    }
    if (help) {
        d->helpers = 0;
        atomic_fetch_and(&d->own->sleepers, ~(uint32_t)(HELPER | SLEEPER_CALLER | SLEEPER_WORKER));
        if (d->workers_asleep && anything_queued(d)) {
            atomic_fetch_or(&d->own->sleepers, SLEEPER_WORKER);
            if (any_can_run(d))
                host_ring(d->own);
        }
    }
    pthread_mutex_unlock(&d->lock);
    return host_failure(&d->face, NULL);
}

int host_caller_wait(fab_queue *q, fab_event *e, void *stream)
{
    host_goal goal = {q, e, e->recorded};
    (void)stream;
    return reached(&goal) ? host_failure(&q->device->face, NULL) : wait_until(q->device, &goal);
}

int host_sync(fab_queue *q)
{
    host_goal goal = {q, NULL, 0};
    return wait_until(q->device, &goal);
}
