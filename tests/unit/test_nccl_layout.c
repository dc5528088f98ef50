/*
 * What library.h declares against NCCL's own headers: sizes, offsets, values and signatures. The folder with nccl.h is
 * named when this is built: TIDE_NCCL_INCLUDE=folder make ... It wants the CUDA toolkit's headers as well.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#if defined TIDE_NCCL_HEADERS && __has_include(<nccl.h>)
#include <nccl.h>
#include <nccl_device.h>

/* The names that cuda.h, which NCCL's headers include, gives as well. */
#define CU_STREAM_NON_BLOCKING OUR_NON_BLOCKING
#define CU_EVENT_DISABLE_TIMING OUR_DISABLE_TIMING
#include "fabric/nccl/library.h"

static int wrong;
static void same(const char *what, uint64_t ours, uint64_t theirs)
{
    if (ours != theirs) {
        fprintf(stderr, "library.h: %s: %llu, nccl.h: %llu\n", what, (unsigned long long)ours, (unsigned long long)theirs);
        wrong++;
    }
}
#define SAME(ours, theirs) same(#ours, (uint64_t)(ours), (uint64_t)(theirs))
#define FIELD(our, a, their, b)                                                   \
    do {                                                                          \
        same(#our "." #a " (offset)", offsetof(our, a), offsetof(their, b));      \
        same(#our "." #a " (bytes)", sizeof((our *)0)->a, sizeof((their *)0)->b); \
    } while (0)

static void test_values(void **state)
{
    const nccl_config our_config = NCCL_CONFIG_INIT;
    const ncclConfig_t their_config = NCCL_CONFIG_INITIALIZER;
    const nccl_properties our_properties = NCCL_PROPERTIES_INIT;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
    const ncclCommProperties_t their_properties = NCCL_COMM_PROPERTIES_INITIALIZER;
#pragma GCC diagnostic pop
    nccl_config config = our_config;

    (void)state;
    SAME(NCCL_OK, ncclSuccess);
    SAME(NCCL_UNHANDLED_CUDA_ERROR, ncclUnhandledCudaError);
    SAME(NCCL_SYSTEM_ERROR, ncclSystemError);
    SAME(NCCL_INTERNAL_ERROR, ncclInternalError);
    SAME(NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
    SAME(NCCL_INVALID_USAGE, ncclInvalidUsage);
    SAME(NCCL_REMOTE_ERROR, ncclRemoteError);
    SAME(NCCL_IN_PROGRESS, ncclInProgress);
    SAME(NCCL_TIMEOUT, ncclTimeout);
    SAME(NCCL_UNDEF, NCCL_CONFIG_UNDEF_INT);
    SAME(NCCL_MAGIC, NCCL_API_MAGIC);
    SAME(NCCL_UINT8, ncclUint8);
    SAME(NCCL_WIN_SYMMETRIC, NCCL_WIN_COLL_SYMMETRIC);
    SAME(NCCL_WIN_ALIGNMENT, NCCL_WIN_REQUIRED_ALIGNMENT);
    assert_true(NCCL_VERSION_CODE >= NCCL_OLDEST);
    /* Of a header newer than the oldest library that will do, the initializers say its own version and size. */
    config.version = their_config.version;
    if (sizeof config == sizeof their_config)
        assert_memory_equal(&config, &their_config, sizeof config);
    if (NCCL_VERSION_CODE == NCCL_OLDEST) {
        SAME(our_config.version, their_config.version);
        SAME(our_properties.version, their_properties.version);
        SAME(our_properties.size, their_properties.size);
    }
    SAME(our_config.magic, their_config.magic);
    SAME(our_properties.magic, their_properties.magic);
    assert_int_equal(wrong, 0);
}

static void test_layouts(void **state)
{
    (void)state;
    SAME(sizeof(nccl_result), sizeof(ncclResult_t));
    SAME(sizeof(int), sizeof(ncclDataType_t));
    SAME(sizeof(nccl_comm), sizeof(ncclComm_t));
    SAME(sizeof(nccl_window), sizeof(ncclWindow_t));
    SAME(sizeof(cu_stream), sizeof(cudaStream_t));
    SAME(sizeof(nccl_id), sizeof(ncclUniqueId));
    SAME(_Alignof(nccl_id), _Alignof(ncclUniqueId));

    if (NCCL_VERSION_CODE == NCCL_OLDEST) /* fields have been added behind since */
        SAME(sizeof(nccl_config), sizeof(ncclConfig_t));
    FIELD(nccl_config, size, ncclConfig_t, size);
    FIELD(nccl_config, magic, ncclConfig_t, magic);
    FIELD(nccl_config, version, ncclConfig_t, version);
    FIELD(nccl_config, blocking, ncclConfig_t, blocking);
    FIELD(nccl_config, cga_cluster_size, ncclConfig_t, cgaClusterSize);
    FIELD(nccl_config, min_ctas, ncclConfig_t, minCTAs);
    FIELD(nccl_config, max_ctas, ncclConfig_t, maxCTAs);
    FIELD(nccl_config, net_name, ncclConfig_t, netName);
    FIELD(nccl_config, split_share, ncclConfig_t, splitShare);
    FIELD(nccl_config, traffic_class, ncclConfig_t, trafficClass);
    FIELD(nccl_config, comm_name, ncclConfig_t, commName);
    FIELD(nccl_config, collnet_enable, ncclConfig_t, collnetEnable);
    FIELD(nccl_config, cta_policy, ncclConfig_t, CTAPolicy);
    FIELD(nccl_config, shrink_share, ncclConfig_t, shrinkShare);
    FIELD(nccl_config, nvls_ctas, ncclConfig_t, nvlsCTAs);
    FIELD(nccl_config, channels_per_net_peer, ncclConfig_t, nChannelsPerNetPeer);
    FIELD(nccl_config, nvlink_centric_sched, ncclConfig_t, nvlinkCentricSched);
    FIELD(nccl_config, graph_usage_mode, ncclConfig_t, graphUsageMode);
    FIELD(nccl_config, num_rma_ctx, ncclConfig_t, numRmaCtx);
    FIELD(nccl_config, max_p2p_peers, ncclConfig_t, maxP2pPeers);
    FIELD(nccl_config, graph_stream_ordering, ncclConfig_t, graphStreamOrdering);
    FIELD(nccl_config, launch_order_implicit, ncclConfig_t, launchOrderImplicit);
    FIELD(nccl_config, num_rma_sig, ncclConfig_t, numRmaSig);
    FIELD(nccl_config, rma_eager_init, ncclConfig_t, rmaEagerInit);
    FIELD(nccl_config, host_cft_mode, ncclConfig_t, hostCftMode);

    if (NCCL_VERSION_CODE == NCCL_OLDEST)
        SAME(sizeof(nccl_properties), sizeof(ncclCommProperties_t));
    FIELD(nccl_properties, size, ncclCommProperties_t, size);
    FIELD(nccl_properties, magic, ncclCommProperties_t, magic);
    FIELD(nccl_properties, version, ncclCommProperties_t, version);
    FIELD(nccl_properties, rank, ncclCommProperties_t, rank);
    FIELD(nccl_properties, n_ranks, ncclCommProperties_t, nRanks);
    FIELD(nccl_properties, cuda_dev, ncclCommProperties_t, cudaDev);
    FIELD(nccl_properties, nvml_dev, ncclCommProperties_t, nvmlDev);
    FIELD(nccl_properties, device_api_support, ncclCommProperties_t, deviceApiSupport);
    FIELD(nccl_properties, multimem_support, ncclCommProperties_t, multimemSupport);
    FIELD(nccl_properties, gin_type, ncclCommProperties_t, ginType);
    FIELD(nccl_properties, n_lsa_teams, ncclCommProperties_t, nLsaTeams);
    FIELD(nccl_properties, host_rma_support, ncclCommProperties_t, hostRmaSupport);
    FIELD(nccl_properties, railed_gin_type, ncclCommProperties_t, railedGinType);
    FIELD(nccl_properties, comm_hash, ncclCommProperties_t, commHash);
    FIELD(nccl_properties, gin_min_stride, ncclCommProperties_t, ginMinStride);
    FIELD(nccl_properties, gin_connection_type, ncclCommProperties_t, ginConnectionType);
    FIELD(nccl_properties, gin_support, ncclCommProperties_t, ginSupport);
    FIELD(nccl_properties, dev_comm_runtime_version_size, ncclCommProperties_t, devCommRuntimeVersionSize);

    SAME(sizeof(nccl_wait_desc), sizeof(ncclWaitSignalDesc_t));
    FIELD(nccl_wait_desc, op_count, ncclWaitSignalDesc_t, opCnt);
    FIELD(nccl_wait_desc, peer, ncclWaitSignalDesc_t, peer);
    FIELD(nccl_wait_desc, sig, ncclWaitSignalDesc_t, sigIdx);
    FIELD(nccl_wait_desc, ctx, ncclWaitSignalDesc_t, ctx);
    assert_int_equal(wrong, 0);
}

/* Each signature once, in words for the types; spelt in either header's types it has to be that header's. That the types
 * themselves agree is asked above. X(field, exported name, result, parameters) */
#define SIGNATURES(X)                                                                                                 \
    X(GetErrorString, ncclGetErrorString, const char *, (RESULT))                                                     \
    X(GetLastError, ncclGetLastError, const char *, (COMM))                                                           \
    X(GetUniqueId, ncclGetUniqueId, RESULT, (ID *))                                                                   \
    X(CommInitRankConfig, ncclCommInitRankConfig, RESULT, (COMM *, int, ID, int, CONFIG *))                           \
    X(CommFinalize, ncclCommFinalize, RESULT, (COMM))                                                                 \
    X(CommDestroy, ncclCommDestroy, RESULT, (COMM))                                                                   \
    X(CommAbort, ncclCommAbort, RESULT, (COMM))                                                                       \
    X(CommGetAsyncError, ncclCommGetAsyncError, RESULT, (COMM, RESULT *))                                             \
    X(CommQueryProperties, ncclCommQueryProperties, RESULT, (COMM, PROPERTIES *))                                     \
    X(CommWindowRegister, ncclCommWindowRegister, RESULT, (COMM, void *, size_t, WINDOW *, int))                      \
    X(CommWindowDeregister, ncclCommWindowDeregister, RESULT, (COMM, WINDOW))                                         \
    X(GroupStart, ncclGroupStart, RESULT, (void))                                                                     \
    X(GroupEnd, ncclGroupEnd, RESULT, (void))                                                                         \
    X(PutSignal, ncclPutSignal, RESULT,                                                                               \
      (const void *, size_t, DATATYPE, int, WINDOW, size_t, int, int, unsigned, COMM, STREAM))                        \
    X(Signal, ncclSignal, RESULT, (int, int, int, unsigned, COMM, STREAM))                                            \
    X(WaitSignal, ncclWaitSignal, RESULT, (int, WAIT *, COMM, STREAM))

static void test_signatures(void **state)
{
    static const char *const declared[] = {
#define NAME(field, name, result, parameters) name,
        NCCL_LIBRARY(NAME)
#undef NAME
    };
    static const char *const compared[] = {
#define NAME(field, name, result, parameters) #name,
        SIGNATURES(NAME)
#undef NAME
    };

    (void)state;
    assert_int_equal(sizeof declared, sizeof compared);
    for (size_t i = 0; i < sizeof compared / sizeof compared[0]; i++)
        assert_string_equal(declared[i], compared[i]);
#define CHECK(field, name, result, parameters)                                                                       \
    same(#name " (as declared)", 1, __builtin_types_compatible_p(__typeof__(SYMBOL(field, name)), result(*) parameters));
#define SYMBOL(field, name) &name
#define RESULT ncclResult_t
#define COMM ncclComm_t
#define ID ncclUniqueId
#define CONFIG ncclConfig_t
#define PROPERTIES ncclCommProperties_t
#define WINDOW ncclWindow_t
#define DATATYPE ncclDataType_t
#define STREAM cudaStream_t
#define WAIT ncclWaitSignalDesc_t
    SIGNATURES(CHECK)
#undef SYMBOL
#undef RESULT
#undef COMM
#undef ID
#undef CONFIG
#undef PROPERTIES
#undef WINDOW
#undef DATATYPE
#undef STREAM
#undef WAIT
#define SYMBOL(field, name) ((nccl_library *)0)->field
#define RESULT nccl_result
#define COMM nccl_comm
#define ID nccl_id
#define CONFIG nccl_config
#define PROPERTIES nccl_properties
#define WINDOW nccl_window
#define DATATYPE int
#define STREAM cu_stream
#define WAIT nccl_wait_desc
    SIGNATURES(CHECK)
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values), cmocka_unit_test(test_layouts),
                                       cmocka_unit_test(test_signatures)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
static void test_nothing(void **state)
{
    (void)state;
    printf("not run: TIDE_NCCL_INCLUDE names no folder with nccl.h: library.h is not compared with it\n");
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
