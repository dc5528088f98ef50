/* rules_peer.c - rules of two devices, and those that may spoil a context. */
#include "cli/rules_tools.h"

/* ---- rules: peers ---------------------------------------------------------------------------- */

#define TWO_DEVICES NEEDS(r->n_devices == 2, "one device")

static enum outcome rule_peers(rules *r)
{
    int can = 0, value = 0;
    TWO_DEVICES;
    GIVES(r->d->DeviceCanAccessPeer(&can, r->device[0], r->device[1]), CU_OK);
    GIVES(r->d->DeviceGetP2PAttribute(&value, CU_P2P_ACCESS, r->device[0], r->device[1]), CU_OK);
    MUST(can == 1 && value == 1);
    return OK;
}

/* Memory of device 1 that device 0 and device 1 have mapped. */
static bool shared(rules *r, cu_ptr *near, cu_ptr *far)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 1, &bytes);
    *near = rules_mapping(r, h, bytes, 0); /* as device 0 sees it */
    *far = rules_mapping(r, h, bytes, 1);
    return *near && *far;
}

/* A wait of device 1 on its own memory is released by a copy of device 0, behind data. */
static enum outcome rule_peer_copy(rules *r)
{
    enum { N = 100000 };
    cu_ptr near = 0, far = 0, out, in = rules_device_memory(r, N);
    cu_stream s = rules_stream(r), t;
    cu_context c;
    uint64_t value = 0;
    cu_result result = CU_OK;
    TWO_DEVICES;
    MUST(in && s && shared(r, &near, &far));
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    out = rules_device_memory(r, 4096);
    result = rules_one_word(r, t, CU_OP_WAIT_64, far, 1);
    if (result == CU_OK)
        result = r->d->MemcpyAsync(out, far + 4096, 8, t);
    r->d->CtxPop(&c);
    MUST(result == CU_OK && t && out);
    GIVES(r->d->MemsetD8Async(in, 0x66, 32768, s), CU_OK);
    GIVES(r->d->MemcpyAsync(near + 4096, in, 32768, s), CU_OK);
    GIVES(rules_one_word(r, s, CU_OP_WRITE_64, in + 40000, 1), CU_OK);
    GIVES(r->d->MemcpyAsync(near, in + 40000, 8, s), CU_OK);
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    result = rules_dry(r, t) && rules_get(r, &value, out, 8) ? CU_OK : CU_NOT_READY;
    r->d->CtxPop(&c);
    MUST(result == CU_OK && value == UINT64_C(0x6666666666666666));
    return OK;
}

static enum outcome rule_peer_kernel(rules *r)
{
    cu_ptr near = 0, far = 0, a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    cu_function f = NULL;
    cu_context c;
    rules_kernel args;
    uint64_t value = 0;
    bool read;
    TWO_DEVICES;
    MUST(a && s && shared(r, &near, &far) && rules_put_word(r, a, 30));
    GIVES(rules_load_kernel(r, &f), CU_OK);
    args = (rules_kernel){near + 8, a, 3};
    GIVES(rules_launch(r, f, s, &args), CU_OK); /* a kernel may store to a peer */
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    read = rules_get(r, &value, far + 8, 8);
    r->d->CtxPop(&c);
    MUST(read && value == 33);
    return OK;
}

/* What all CTAs of a kernel store to a peer is there when the word is that its last one posts: for a kernel and a copy
 * behind the peer's wait. */
static enum outcome rule_peer_post(rules *r)
{
    enum { ROUNDS = 60, BYTES = 4 << 20, LOOKS = 4, CTAS = 64, THREADS = 256 };
    static const uint32_t at[LOOKS] = {64, BYTES / 3 / 8 * 8, BYTES / 2, BYTES - 8};
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD};
    cu_ptr near = 0, far = 0, done = rules_device_memory(r, 64), out = 0;
    cu_stream s = rules_stream(r), t = NULL;
    cu_function post = NULL, add = NULL;
    cu_handle h = 0;
    cu_context c;
    uint64_t words[ROUNDS * LOOKS];
    bool ok = true;
    TWO_DEVICES;
    prop.location = (cu_location){CU_LOCATION_DEVICE, r->device[1]};
    GIVES(r->d->MemCreate(&h, BYTES, &prop, 0), CU_OK);
    rules_keep(r, A_HANDLE, h, 0);
    near = rules_mapping(r, h, BYTES, 0);
    far = rules_mapping(r, h, BYTES, 1);
    MUST(done && s && near && far && rules_put_word(r, done, 0));
    GIVES(rules_load(r, RULES_POST, &post), CU_OK);
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    out = rules_device_memory(r, sizeof words);
    ok = rules_load_kernel(r, &add) == CU_OK;
    r->d->CtxPop(&c);
    MUST(ok && t && out);
    for (uint32_t i = 0; i < ROUNDS && ok; i++) {
        rules_post args = {near + 64, (BYTES - 64) / 8, i + 1, done, near};
        void *parameters[] = {&args};
        r->d->CtxPush(r->context[1]);
        ok = rules_one_word(r, t, CU_OP_WAIT_64, far, i + 1) == CU_OK;
        for (uint32_t k = 0; k < LOOKS && ok; k++) {
            rules_kernel look = {out + (i * LOOKS + k) * 8, far + at[k], 0};
            ok = (k % 2 ? r->d->MemcpyAsync(look.target, look.source, 8, t) : rules_launch(r, add, t, &look)) == CU_OK;
        }
        r->d->CtxPop(&c);
        ok = ok && r->d->LaunchKernel(post, CTAS, 1, 1, THREADS, 1, 1, 0, s, parameters, NULL) == CU_OK && rules_dry(r, s) &&
             rules_dry(r, t);
    }
    MUST(ok);
    r->d->CtxPush(r->context[1]);
    ok = rules_get(r, words, out, sizeof words);
    r->d->CtxPop(&c);
    MUST(ok && rules_get_word(r, done) == 0);
    for (uint32_t i = 0; i < ROUNDS * LOOKS; i++)
        MUST(words[i] == i / LOOKS + 1);
    return OK;
}

static enum outcome rule_peer_events(rules *r)
{
    cu_stream s = rules_stream(r), t;
    cu_event e = rules_event(r, CU_EVENT_DISABLE_TIMING);
    cu_context c;
    cu_result record, wait;
    bool was_blocked, was_dry;
    int g;
    TWO_DEVICES;
    MUST(s && e && (g = rules_gate(r, s)) >= 0);
    GIVES(r->d->EventRecord(e, s), CU_OK);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    wait = r->d->StreamWaitEvent(t, e, 0); /* of another device: fine */
    was_blocked = rules_blocked(r, t);
    rules_open_gate(r, g);
    was_dry = rules_dry(r, t);
    record = r->d->EventRecord(e, t); /* on another device's stream: not */
    r->d->CtxPop(&c);
    MUST(wait == CU_OK && was_blocked && was_dry && record != CU_OK);
    return OK;
}

static enum outcome rule_peer_stream(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_function f = NULL;
    cu_stream t;
    cu_context c;
    rules_kernel args = {a, a + 64, 0};
    TWO_DEVICES;
    MUST(a && rules_put_word(r, a + 64, 0));
    GIVES(rules_load_kernel(r, &f), CU_OK);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    r->d->CtxPop(&c);
    MUST(t);
    REFUSED(rules_launch(r, f, t, &args)); /* of another device */
    return OK;
}

/* ---- rules whose breach may leave a context that is good for nothing: last -------------------- */

static enum outcome rule_range(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096), b = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    MUST(a && b && s);
    GIVES(r->d->MemcpyAsync(a, b, (size_t)1 << 40, s), CU_INVALID_VALUE);
    MUST(rules_dry(r, s));
    return OK;
}

static enum outcome rule_word_alignment(rules *r)
{
    cu_ptr a = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    MUST(a && s);
    REFUSED(rules_one_word(r, s, CU_OP_WRITE_64, a + 4, 1));
    MUST(rules_dry(r, s));
    return OK;
}

static enum outcome rule_no_access(rules *r)
{
    size_t bytes = 0;
    cu_handle h = rules_handle_on(r, 0, &bytes);
    cu_ptr a = rules_mapping(r, h, bytes, -1), b = rules_device_memory(r, 4096);
    cu_stream s = rules_stream(r);
    MUST(a && b && s);
    REFUSED(r->d->MemcpyAsync(b, a, 64, s));
    MUST(rules_dry(r, s));
    return OK;
}

/* Where a stream operation writes words of a peer at all, the word comes behind the bytes that were copied before it. */
static enum outcome rule_peer_word_order(rules *r)
{
    enum { ROUNDS = 60, BYTES = 4 << 20, LOOKS = 4 };
    static const uint32_t at[LOOKS] = {64, BYTES / 3 / 8 * 8, BYTES / 2, BYTES - 8};
    cu_alloc_prop prop = {.type = CU_ALLOC_PINNED, .handle_types = CU_HANDLE_FD};
    cu_ptr near = 0, far = 0, in = rules_device_memory(r, BYTES), out = 0;
    cu_stream s = rules_stream(r), t = NULL;
    cu_handle h = 0;
    cu_context c;
    uint64_t words[ROUNDS * LOOKS];
    bool ok = true;
    TWO_DEVICES;
    prop.location = (cu_location){CU_LOCATION_DEVICE, r->device[1]};
    GIVES(r->d->MemCreate(&h, BYTES, &prop, 0), CU_OK);
    rules_keep(r, A_HANDLE, h, 0);
    near = rules_mapping(r, h, BYTES, 0);
    far = rules_mapping(r, h, BYTES, 1);
    MUST(in && s && near && far);
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(rules_dry(r, s));
    NEEDS(rules_one_word(r, s, CU_OP_WRITE_64, near, 0) == CU_OK, "refused");
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    out = rules_device_memory(r, sizeof words);
    r->d->CtxPop(&c);
    MUST(t && out);
    for (uint32_t i = 0; i < ROUNDS && ok; i++) {
        r->d->CtxPush(r->context[1]);
        ok = rules_one_word(r, t, CU_OP_WAIT_64, far, i + 1) == CU_OK;
        for (uint32_t k = 0; k < LOOKS && ok; k++)
            ok = r->d->MemcpyAsync(out + (i * LOOKS + k) * 8, far + at[k], 8, t) == CU_OK;
        r->d->CtxPop(&c);
        ok = ok && r->d->MemsetD8Async(in, (unsigned char)(i + 1), BYTES, s) == CU_OK &&
             r->d->MemcpyAsync(near + 64, in + 64, BYTES - 64, s) == CU_OK &&
             rules_one_word(r, s, CU_OP_WRITE_64, near, i + 1) == CU_OK && rules_dry(r, s) && rules_dry(r, t);
    }
    MUST(ok);
    r->d->CtxPush(r->context[1]);
    ok = rules_get(r, words, out, sizeof words);
    r->d->CtxPop(&c);
    MUST(ok);
    for (uint32_t i = 0; i < ROUNDS * LOOKS; i++)
        MUST(words[i] == (i / LOOKS + 1) * UINT64_C(0x0101010101010101));
    return OK;
}

/* What comes of a word of a peer. */
static enum outcome rule_peer_word(rules *r)
{
    cu_ptr near = 0, far = 0;
    cu_stream s = rules_stream(r), t;
    cu_context c;
    cu_result written, awaited;
    uint64_t value = 0;
    bool came;
    TWO_DEVICES;
    MUST(s && shared(r, &near, &far));
    GIVES(r->d->MemsetD8Async(near, 0, 64, s), CU_OK);
    MUST(rules_dry(r, s));
    written = rules_one_word(r, s, CU_OP_WRITE_64, near, 7);
    MUST(rules_dry(r, s));
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    t = rules_stream(r);
    came = rules_get(r, &value, far, 8) && value == 7;
    r->d->CtxPop(&c);
    awaited = rules_one_word(r, s, CU_OP_WAIT_64, near, 9);
    GIVES(r->d->CtxPush(r->context[1]), CU_OK);
    rules_one_word(r, t, CU_OP_WRITE_64, far, 9);
    r->d->CtxPop(&c);
    MUST(t && rules_dry(r, s));
    r->note = written != CU_OK ? awaited != CU_OK ? "both refused" : "not written, awaited"
              : !came          ? "written into the void"
              : awaited != CU_OK ? "written, not awaited"
                                 : "written and awaited";
    return OK;
}

const rule rules_of_peers[] = {
    {"peers see each other", rule_peers},
    {"a copy to a peer releases its wait, with what came before it", rule_peer_copy},
    {"a word written to a peer comes behind the bytes", rule_peer_word_order},
    {"a kernel stores to a peer", rule_peer_kernel},
    {"a word that a kernel posts to a peer comes behind its stores", rule_peer_post},
    {"an event is awaited on any device, recorded on its own", rule_peer_events},
    {"a launch on another device's stream is refused", rule_peer_stream},
    {"a copy beyond an allocation is refused", rule_range},
    {"an unaligned word is refused", rule_word_alignment},
    {"memory without access is refused", rule_no_access},
    {"a word of a peer", rule_peer_word},
    {NULL, NULL},
};
