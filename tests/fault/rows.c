/* rows.c - the faults. */
#include <stddef.h>

#include "fault.h"
#include "schedule/schedule.h"
#include "tide/tide.h"

/* clang-format off */
#define LOST .when = WHEN_RAIL, .what = WHAT_RAIL
#define LATE(how, sig, n) .rail = {.seed = 11, .how = 65536, .sigs = 1u << sig, .nth = n, .delay_us = 20000}
#define NOW(how, sig, n) .rail = {.seed = 11, .how = 65536, .sigs = 1u << sig, .nth = n}
#define CODES(...) .codes = {__VA_ARGS__}
#define TEXTS(...) .texts = {__VA_ARGS__}
#define AG .work = WORK_GATHER
#define RS .work = WORK_SCATTER
#define BOTH .work = WORK_GATHER | WORK_SCATTER
#define AT(m, l) .nodes = m, .local = l
#define NETWORK CODES(TIDE_ERR_NETWORK)
#define KILLED(p, n) .kind = "peer killed", .when = WHEN_ITEM, .what = WHAT_KILL, .phase = p, .at = n, \
    CODES(TIDE_ERR_PEER_DEAD), TEXTS("rank 1 (process ", "died"), .limit_ms = 5000
#define GATHERED(k) .kind = "peer killed", .name = "set-up, exchange " #k, .when = WHEN_GATHER, .what = WHAT_KILL, \
    .at = k, AG, CODES(TIDE_ERR_PEER_DEAD), TEXTS("rank ", ""), .limit_ms = 5000
#define STOPPED .kind = "peer stopped", .what = WHAT_STOP, .deadline_ms = 400, .limit_ms = 5000
#define DIFFERENT(how) .kind = "mismatched signature", .what = WHAT_DIFFER, .which = how, BOTH
#define MISMATCH CODES(TIDE_ERR_MISMATCH)
#define NO_MEMORY .kind = "allocation failure", .when = WHEN_MEMORY, .what = WHAT_FAIL, CODES(TIDE_ERR_MEMORY), \
    TEXTS("failure injected", "")
#define REFUSED(c) .kind = "registration failure", .name = "set-up, call 1, 2, ... of " #c, .when = WHEN_CALL, \
    .what = WHAT_FAIL, .which = c, BOTH, AT(1, 3), .limit_ms = 5000

const fault_row fault_rows[] = {
    /* a message with its bytes */
    {.kind = "lost put", .name = "all-gather heads", AT(2, 2), AG, LOST, NOW(drop, SIG_HEAD, 2), NETWORK,
     TEXTS("message ", "lost or was overtaken")},
    {.kind = "lost put", .name = "all-gather tails", AT(2, 2), AG, LOST, NOW(drop, SIG_TAIL, 2), NETWORK,
     TEXTS("message ", "lost or was overtaken"), .threads = true},
    {.kind = "lost put", .name = "all-gather tails, the last message", AT(2, 1), AG, LOST, NOW(drop, SIG_TAIL, 24),
     .deadline_ms = 400, .limit_ms = 5000,
     CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.4", "for rank ")},
    {.kind = "lost put", .name = "all-gather, 3 nodes", AT(3, 1), AG, LOST, NOW(drop, SIG_HEAD, 3), NETWORK,
     TEXTS("message ", "of rank 1"), .threads = true},
    {.kind = "lost put", .name = "reduce-scatter block", AT(2, 2), RS, LOST, NOW(drop, SIG_HEAD, 2), NETWORK,
     TEXTS("message ", "lost or was overtaken")},
    {.kind = "lost put", .name = "reduce-scatter block, the last message", AT(2, 1), RS, LOST, NOW(drop, SIG_HEAD, 6),
     .deadline_ms = 400, .limit_ms = 5000,
     CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.4", "for rank ")},
    {.kind = "lost put", .name = "one stripe of an all-gather over four contexts", AT(2, 1), AG, .large = true, LOST,
     NOW(drop, SIG_HEAD, 12), .deadline_ms = 400,
     .limit_ms = 5000, CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.4", "in all_gather")},

    {.kind = "lost signal", .name = "all-gather credit", AT(2, 2), AG, LOST, NOW(drop, SIG_CREDIT, 3), NETWORK,
     TEXTS("message ", "lost or was overtaken")},
    {.kind = "lost signal", .name = "all-gather go", AT(3, 1), AG, LOST, NOW(drop, SIG_GO, 2), NETWORK,
     TEXTS("message ", "lost or was overtaken")},
    {.kind = "lost signal", .name = "reduce-scatter credit", AT(2, 2), RS, LOST, NOW(drop, SIG_CREDIT, 2), NETWORK,
     TEXTS("message ", "lost or was overtaken"), .threads = true},
    {.kind = "lost signal", .name = "any of two hundred", AT(3, 2), BOTH,
     .threads = true, LOST,
     .rail = {.seed = 5, .drop = 3000, .delay_us = 200}, .deadline_ms = 400, .limit_ms = 5000,
     CODES(TIDE_ERR_NETWORK, TIDE_ERR_DEADLINE), TEXTS("rank ", "call ")},

    {.kind = "duplicate signal", .name = "all-gather credit", AT(2, 2), AG, LOST, NOW(duplicate, SIG_CREDIT, 2),
     NETWORK, TEXTS("came again", "all_gather credit")},
    {.kind = "duplicate signal", .name = "all-gather go", AT(3, 1), AG, LOST, NOW(duplicate, SIG_GO, 2), NETWORK,
     TEXTS("came again", "all_gather go"), .threads = true},
    {.kind = "duplicate signal", .name = "all-gather heads with their bytes", AT(2, 2), AG, LOST,
     NOW(duplicate, SIG_HEAD, 2), NETWORK, TEXTS("came again", "all_gather heads")},
    {.kind = "duplicate signal", .name = "all-gather tails, late", AT(2, 2), AG, LOST, LATE(duplicate, SIG_TAIL, 2),
     NETWORK, TEXTS("came again", "all_gather tails")},
    {.kind = "duplicate signal", .name = "reduce-scatter credit", AT(3, 1), RS, LOST, NOW(duplicate, SIG_CREDIT, 3),
     NETWORK, TEXTS("came again", "reduce_scatter credit")},
    {.kind = "duplicate signal", .name = "reduce-scatter block with its bytes", AT(2, 2), RS, LOST,
     NOW(duplicate, SIG_HEAD, 2), NETWORK, TEXTS("came again", "reduce_scatter arrive"),
     .threads = true},

    {.kind = "reordered contexts", .name = "all-gather: contexts overtake each other, which is allowed", AT(2, 1), AG,
     .large = true, LOST,
     .rail = {.seed = 3, .delay_us = 8000}},
    {.kind = "reordered contexts", .name = "reduce-scatter: likewise", AT(3, 2), RS, .large = true, .threads = true,
     LOST, .rail = {.seed = 4, .delay_us = 3000}},
    {.kind = "reordered contexts", .name = "within a context: a head overtakes a credit", AT(2, 2), AG, LOST,
     LATE(overtake, SIG_CREDIT, 2), NETWORK, TEXTS("lost or was overtaken", "")},
    {.kind = "reordered contexts", .name = "within a context: a tail overtakes a head", AT(2, 2), AG, LOST,
     LATE(overtake, SIG_HEAD, 2), NETWORK, TEXTS("lost or was overtaken", "")},
    {.kind = "reordered contexts", .name = "within a context: a block overtakes a credit", AT(2, 1), RS, LOST,
     LATE(overtake, SIG_CREDIT, 2), NETWORK, TEXTS("lost or was overtaken", ""),
     .threads = true},

    {.kind = "corrupted length", .name = "all-gather heads", AT(2, 2), AG, LOST, NOW(cut, SIG_HEAD, 2), NETWORK,
     TEXTS(" bytes, expected ", "all_gather heads")},
    {.kind = "corrupted length", .name = "all-gather tails", AT(3, 1), AG, LOST, NOW(cut, SIG_TAIL, 3), NETWORK,
     TEXTS(" bytes, expected ", "all_gather tails"), .threads = true},
    {.kind = "corrupted length", .name = "reduce-scatter block", AT(2, 2), RS, LOST, NOW(cut, SIG_HEAD, 3), NETWORK,
     TEXTS(" bytes, expected ", "reduce_scatter arrive")},
    {.kind = "corrupted length", .name = "reduce-scatter, 3 nodes", AT(3, 1), RS, LOST, NOW(cut, SIG_HEAD, 4),
     NETWORK, TEXTS(" bytes, expected ", "of rank 1")},

    {KILLED("all_gather free", 2), .name = "all-gather free", AT(1, 3), AG},
    {KILLED("all_gather done", 2), .name = "all-gather done", AT(1, 3), AG},
    {KILLED("all_gather credit", 3), .name = "all-gather credit", AT(2, 2), AG},
    {KILLED("all_gather go", 3), .name = "all-gather go", AT(3, 1), AG},
    {KILLED("all_gather heads", 3), .name = "all-gather heads", AT(2, 2), AG},
    {KILLED("all_gather tails", 3), .name = "all-gather tails", AT(2, 2), AG},
    {KILLED("reduce_scatter push", 4), .name = "reduce-scatter push", AT(1, 3), RS},
    {KILLED("reduce_scatter sum", 4), .name = "reduce-scatter sum", AT(1, 3), RS},
    {KILLED("reduce_scatter credit", 3), .name = "reduce-scatter credit", AT(2, 2), RS},
    {KILLED("reduce_scatter arrive", 3), .name = "reduce-scatter arrive", AT(2, 2), RS},
    {KILLED("reduce_scatter land", 3), .name = "reduce-scatter land", AT(2, 2), RS},
    {KILLED(NULL, 40), .name = "any item", AT(1, 3), BOTH},
    {KILLED(NULL, 90), .name = "any item", AT(2, 2), BOTH},
    {KILLED(NULL, 140), .name = "any item", AT(3, 1), BOTH},
    {.kind = "peer killed", .name = "between two calls", AT(2, 2), AG, .when = WHEN_IDLE, .at = 2, .what = WHAT_KILL,
     CODES(TIDE_ERR_PEER_DEAD), TEXTS("rank 1 (process ", "died"), .limit_ms = 5000},
    {.kind = "peer killed", .name = "ends by itself between two calls", AT(1, 3), RS, .when = WHEN_IDLE, .at = 2,
     .what = WHAT_EXIT, CODES(TIDE_ERR_PEER_DEAD), TEXTS("rank 1 (process ", "died"), .limit_ms = 5000},
    {.kind = "peer killed", .name = "before the last meeting", AT(2, 2), AG, .when = WHEN_LEAVING, .what = WHAT_KILL,
     CODES(TIDE_ERR_PEER_DEAD),
     TEXTS("rank 1 (process ", "idle"), .limit_ms = 5000},
    {GATHERED(1), AT(1, 3)}, {GATHERED(8), AT(2, 2)}, {GATHERED(16), AT(1, 3)}, {GATHERED(24), AT(2, 1)},
     {GATHERED(32), AT(1, 3)},
    {.kind = "peer killed", .name = "set-up, while descriptors are exchanged", AT(1, 3), AG, .when = WHEN_CALL,
     .which = CALL_SENDMSG, .at = 2, .what = WHAT_KILL,
     CODES(TIDE_ERR_PEER_DEAD), TEXTS("rank ", ""), .limit_ms = 5000},

    {STOPPED, .name = "all-gather heads", AT(2, 2), AG, .when = WHEN_ITEM, .phase = "all_gather heads", .at = 3,
     CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.", "in all_gather")},
    {STOPPED, .name = "all-gather, one node", AT(1, 3), AG, .when = WHEN_ITEM, .at = 20, CODES(TIDE_ERR_DEADLINE),
     TEXTS("waited 0.", "rank 1 in all_gather")},
    {STOPPED, .name = "reduce-scatter arrive", AT(2, 2), RS, .when = WHEN_ITEM, .phase = "reduce_scatter arrive",
     .at = 3, CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.", "in reduce_scatter")},
    {STOPPED, .name = "before the last meeting", AT(1, 3), AG, .when = WHEN_LEAVING, CODES(TIDE_ERR_DEADLINE),
     TEXTS("for rank 1 in destroy", "")},
    {.kind = "peer stopped", .name = "set-up, while descriptors are exchanged", AT(1, 3), AG, .when = WHEN_CALL,
     .which = CALL_SENDMSG, .at = 1, .what = WHAT_STOP,
     .deadline_ms = 400, .limit_ms = 7000, CODES(TIDE_ERR_DEADLINE, TIDE_ERR_PEER_DEAD), TEXTS("rank ", "")},
    {.kind = "peer stopped", .name = "set-up, in an exchange", AT(2, 2), AG, .when = WHEN_GATHER, .at = 12,
     .what = WHAT_STOP, .deadline_ms = 400, .limit_ms = 7000,
     CODES(TIDE_ERR_DEADLINE, TIDE_ERR_PEER_DEAD), TEXTS("rank ", "")},
    {.kind = "peer stopped", .name = "for 200 ms, which is no fault", AT(2, 2), BOTH,
     .when = WHEN_ITEM, .at = 60, .what = WHAT_STOP, .resume_ms = 200},

    {DIFFERENT(DIFFER_OPTION), .name = "an option", AT(2, 2), MISMATCH,
     TEXTS("options.n_stg: 2 on ranks 0, 2-3, 3 on rank 1", "")},
    {DIFFERENT(DIFFER_NODE_SIZE), .name = "node_size", AT(2, 2), MISMATCH,
     TEXTS("node_size: 2 on ranks 0, 2-3, 4 on rank 1", ""), .threads = true},
    {DIFFERENT(DIFFER_EXTENT), .name = "an extent", AT(1, 3), MISMATCH,
     TEXTS("group 1 'second' param 2 'head' dims[1]: 33 on ranks 0, 2, 34 on rank 1", "")},
    {DIFFERENT(DIFFER_DTYPE), .name = "a dtype", AT(2, 1), MISMATCH,
     TEXTS("group 1 'second' dtype: 1 on rank 0, 2 on rank 1", ""), .threads = true},
    {DIFFERENT(DIFFER_NAME), .name = "a name", AT(1, 3), MISMATCH,
     TEXTS("group 1 name: 'second' on ranks 0, 2, 'another' on rank 1", "")},
    {DIFFERENT(DIFFER_GROUPS), .name = "the number of groups", AT(2, 2), MISMATCH,
     TEXTS("n_groups: 3 on ranks 0, 2-3, 2 on rank 1", "")},
    {.kind = "mismatched signature", .what = WHAT_DIFFER, .which = DIFFER_CALL, .name = "another group's all-gather",
     AT(1, 3), AG, MISMATCH, TEXTS("disagree", "make different calls"), .threads = true},
    {.kind = "mismatched signature", .what = WHAT_DIFFER, .which = DIFFER_CALL,
     .name = "another group's reduce-scatter", AT(2, 2), RS, MISMATCH, TEXTS("disagree", "make different calls")},
    {.kind = "mismatched signature", .what = WHAT_DIFFER, .which = DIFFER_SKIP, .name = "one call fewer", AT(2, 2),
     AG, .deadline_ms = 400, .limit_ms = 5000,
     CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.", "")},
    {.kind = "mismatched signature", .what = WHAT_DIFFER, .which = DIFFER_SKIP, .name = "one call fewer", AT(1, 3),
     AG, .threads = true, .deadline_ms = 400, .limit_ms = 5000,
     CODES(TIDE_ERR_DEADLINE), TEXTS("waited 0.", "")},

    {.kind = "mismatched plan digest", .what = WHAT_DIFFER, .which = DIFFER_PLAN, .name = "one node", AT(1, 3), AG,
     MISMATCH, TEXTS("plan digest: ", " on rank 1")},
    {.kind = "mismatched plan digest", .what = WHAT_DIFFER, .which = DIFFER_PLAN, .name = "two nodes", AT(2, 2), RS,
     MISMATCH, TEXTS("plan digest: ", " on rank 1")},

    {NO_MEMORY, .name = "set-up, allocation 1, 2, ...", AT(1, 3), AG},
    {NO_MEMORY, .name = "set-up, allocation 1, 2, ..., 2 nodes", AT(2, 1), RS},
    {NO_MEMORY, .name = "a new subset's first call, allocation 1, 2, ...", AT(2, 1), RS, .late = true, .alone = true},

    {REFUSED(CALL_MEMFD), CODES(TIDE_ERR_SYSTEM), TEXTS("memfd_create: ", "")},
    {REFUSED(CALL_FALLOCATE), CODES(TIDE_ERR_MEMORY), TEXTS("fallocate of ", "")},
    {REFUSED(CALL_MMAP), CODES(TIDE_ERR_MEMORY), TEXTS("mmap of ", "")},
    {REFUSED(CALL_SOCKET), CODES(TIDE_ERR_SYSTEM), TEXTS("", "")},
    {REFUSED(CALL_BIND), CODES(TIDE_ERR_SYSTEM), TEXTS("bind: ", "")},
    {REFUSED(CALL_LISTEN), CODES(TIDE_ERR_SYSTEM), TEXTS("listen: ", "")},
    {REFUSED(CALL_CONNECT), CODES(TIDE_ERR_SYSTEM), TEXTS("", "")},
    {REFUSED(CALL_SENDMSG), CODES(TIDE_ERR_SYSTEM), TEXTS("", "")},
    {REFUSED(CALL_ACCEPT), CODES(TIDE_ERR_SYSTEM), TEXTS("accept: ", "")},
    {REFUSED(CALL_RECVMSG), CODES(TIDE_ERR_SYSTEM), TEXTS("recvmsg: ", "")},
    {REFUSED(CALL_PIDFD), CODES(TIDE_ERR_SYSTEM), TEXTS("", "")},
    {REFUSED(CALL_EVENTFD), CODES(TIDE_ERR_SYSTEM), TEXTS("eventfd: ", "")},
    {REFUSED(CALL_THREAD), CODES(TIDE_ERR_SYSTEM), TEXTS("pthread_create: ", "")},
};
/* clang-format on */
const uint32_t fault_n_rows = sizeof fault_rows / sizeof fault_rows[0];
