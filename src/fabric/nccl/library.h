/*
 * library.h - NCCL as a table of functions, found at run time: no NCCL header and no NCCL library is needed to build. What
 * is declared here has NCCL 2.31's layout and values; a test compares it with nccl.h where that is installed.
 *
 * Tests put a fake under the table. Nothing in this folder calls NCCL by another way.
 */
#ifndef TIDE_NCCL_LIBRARY_H
#define TIDE_NCCL_LIBRARY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fabric/cuda/driver.h"

enum { NCCL_OLDEST = 23102 }; /* 2.31.2: contexts and signal indices of one-sided transfers */

typedef int nccl_result;
enum {
    NCCL_OK = 0,
    NCCL_UNHANDLED_CUDA_ERROR = 1,
    NCCL_SYSTEM_ERROR = 2,
    NCCL_INTERNAL_ERROR = 3,
    NCCL_INVALID_ARGUMENT = 4,
    NCCL_INVALID_USAGE = 5,
    NCCL_REMOTE_ERROR = 6,
    NCCL_IN_PROGRESS = 7,
    NCCL_TIMEOUT = 8
};

typedef struct nccl_comm *nccl_comm;
typedef struct nccl_window *nccl_window;
typedef struct nccl_id { char bytes[128]; } nccl_id;

enum { NCCL_UNDEF = INT_MIN }; /* of a field of nccl_config: NCCL chooses */
#define NCCL_MAGIC 0xcafebeefu
typedef struct nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *comm_name;
    int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer, nvlink_centric_sched,
        graph_usage_mode, num_rma_ctx, max_p2p_peers, graph_stream_ordering, launch_order_implicit, num_rma_sig,
        rma_eager_init, host_cft_mode;
} nccl_config;
#define NCCL_CONFIG_INIT                                                                                               \
    {                                                                                                                  \
        sizeof(nccl_config), NCCL_MAGIC, NCCL_OLDEST, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NULL, NCCL_UNDEF, \
            NCCL_UNDEF, NULL, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF,      \
            NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF, NCCL_UNDEF                         \
    }

typedef struct nccl_properties {
    size_t size;
    unsigned magic, version;
    int rank, n_ranks, cuda_dev, nvml_dev;
    bool device_api_support, multimem_support;
    int gin_type, n_lsa_teams;
    bool host_rma_support;
    int railed_gin_type;
    uint64_t comm_hash;
    int gin_min_stride, gin_connection_type;
    bool gin_support[64];
    size_t dev_comm_runtime_version_size;
} nccl_properties;
#define NCCL_PROPERTIES_INIT { .size = sizeof(nccl_properties), .magic = NCCL_MAGIC, .version = NCCL_OLDEST }

enum { NCCL_UINT8 = 1 };                                      /* datatypes */
enum { NCCL_WIN_SYMMETRIC = 1, NCCL_WIN_ALIGNMENT = 4096 };   /* window flags; of a window's base */

typedef struct nccl_wait_desc { int op_count, peer, sig, ctx; } nccl_wait_desc;

/* X(field, name, result, parameters) */
#define NCCL_LIBRARY(X)                                                                                                \
    X(GetErrorString, "ncclGetErrorString", const char *, (nccl_result result))                                        \
    X(GetLastError, "ncclGetLastError", const char *, (nccl_comm comm))                                                \
    X(GetUniqueId, "ncclGetUniqueId", nccl_result, (nccl_id * id))                                                     \
    X(CommInitRankConfig, "ncclCommInitRankConfig", nccl_result,                                                       \
      (nccl_comm * comm, int n_ranks, nccl_id id, int rank, nccl_config *config))                                      \
    X(CommFinalize, "ncclCommFinalize", nccl_result, (nccl_comm comm))                                                 \
    X(CommDestroy, "ncclCommDestroy", nccl_result, (nccl_comm comm))                                                   \
    X(CommAbort, "ncclCommAbort", nccl_result, (nccl_comm comm))                                                       \
    X(CommGetAsyncError, "ncclCommGetAsyncError", nccl_result, (nccl_comm comm, nccl_result * error))                  \
    X(CommQueryProperties, "ncclCommQueryProperties", nccl_result, (nccl_comm comm, nccl_properties * properties))     \
    X(CommWindowRegister, "ncclCommWindowRegister", nccl_result,                                                       \
      (nccl_comm comm, void *base, size_t bytes, nccl_window *window, int flags))                                      \
    X(CommWindowDeregister, "ncclCommWindowDeregister", nccl_result, (nccl_comm comm, nccl_window window))             \
    X(GroupStart, "ncclGroupStart", nccl_result, (void))                                                               \
    X(GroupEnd, "ncclGroupEnd", nccl_result, (void))                                                                   \
    X(PutSignal, "ncclPutSignal", nccl_result,                                                                         \
      (const void *local, size_t count, int datatype, int peer, nccl_window window, size_t offset, int sig, int ctx,   \
       unsigned flags, nccl_comm comm, cu_stream stream))                                                              \
    X(Signal, "ncclSignal", nccl_result,                                                                               \
      (int peer, int sig, int ctx, unsigned flags, nccl_comm comm, cu_stream stream))                                  \
    X(WaitSignal, "ncclWaitSignal", nccl_result,                                                                       \
      (int n, nccl_wait_desc *descs, nccl_comm comm, cu_stream stream))

typedef struct nccl_library {
#define NCCL_X(field, name, result, parameters) result(*field) parameters;
    NCCL_LIBRARY(NCCL_X)
#undef NCCL_X
    int version; /* 23102: 2.31.2 */
} nccl_library;

/* The process' NCCL: the one that is loaded already (PyTorch brings its own), else libnccl.so.2. Found once a process and
 * kept; there are never two. TIDE_ERR_UNSUPPORTED says what is missing: no library, too old a version (both numbers), a
 * function that it lacks. */
int nccl_library_get(const nccl_library **out);
/* Tests: stands in for the process' NCCL until it is set to NULL. */
void nccl_library_fake(const nccl_library *library);
/* TIDE_OK, or TIDE_ERR_NETWORK (NCCL_REMOTE_ERROR) or TIDE_ERR_SYSTEM with "what: text of the result (NCCL's last error)". comm
 * may be NULL. */
int nccl_check(const nccl_library *library, nccl_comm comm, nccl_result result, const char *what);

#endif
