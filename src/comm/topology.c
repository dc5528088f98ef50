/* topology.c - which ranks form a node. */
#include <stdio.h>

#include "comm/comm.h"

_Thread_local uint64_t comm_pretended_host;

uint64_t tide_host_identity(void)
{
    return comm_pretended_host ? comm_pretended_host : fab_machine();
}

static int check_given(const uint64_t *hosts, uint32_t n_ranks, uint32_t node_size, char *reason, size_t room)
{
    uint32_t here = 0;
    for (uint32_t r = 0; r < n_ranks; r++) {
        uint32_t first = r / node_size * node_size;
        if (hosts[r] != hosts[first])
            return tide_fail(TIDE_ERR_ARGUMENT,
                             "node_size: %u puts ranks %u and %u into one node, but they are on different machines",
                             node_size, first, r);
        here += hosts[r] == hosts[0];
    }
    if (here > node_size)
        snprintf(reason, room, "virtual nodes: node_size %u of %u ranks on this machine", node_size, here);
    else
        snprintf(reason, room, "node_size %u: a node is a machine", node_size);
    return TIDE_OK;
}

int comm_node_size(const uint64_t *hosts, uint32_t n_ranks, uint32_t node_size, uint32_t *local, char *reason,
                   size_t room)
{
    uint32_t run = 1, at;

    if (node_size != 0) {
        *local = node_size;
        return check_given(hosts, n_ranks, node_size, reason, room);
    }
    *local = 1;
    while (run < n_ranks && hosts[run] == hosts[0])
        run++;
    for (uint32_t first = 0; first < n_ranks; first = at) {
        for (at = first; at < n_ranks && hosts[at] == hosts[first]; at++)
            continue;
        for (uint32_t r = at; r < n_ranks; r++) {
            if (hosts[r] == hosts[first]) {
                snprintf(reason, room,
                         "ranks are not node-major: ranks %u and %u share a machine, rank %u between them does not",
                         first, r, at);
                return TIDE_OK;
            }
        }
        if (at - first != run) {
            snprintf(reason, room, "machines hold different numbers of ranks: %u from rank 0 on, %u from rank %u on",
                     run, at - first, first);
            return TIDE_OK;
        }
    }
    if (run > TIDE_MAX_LOCAL)
        return tide_fail(TIDE_ERR_ARGUMENT,
                         "node_size: 0 makes one node of the %u ranks of a machine, expected at most %d: pass a "
                         "node_size",
                         run, TIDE_MAX_LOCAL);
    *local = run;
    if (run == n_ranks)
        snprintf(reason, room, "one node: all %u ranks are on this machine", run);
    else
        snprintf(reason, room, "a node is a machine: %u ranks each", run);
    return TIDE_OK;
}
