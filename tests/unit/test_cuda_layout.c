/*
 * What driver.h declares against the CUDA toolkit's own header, where that is installed: sizes, offsets, values and the
 * version suffix of every function.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#if __has_include(<cuda.h>)
#define CUDA_HEADER <cuda.h>
#elif __has_include("/usr/local/cuda/include/cuda.h")
#define CUDA_HEADER "/usr/local/cuda/include/cuda.h"
#endif

#ifdef CUDA_HEADER
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include CUDA_HEADER
#pragma GCC diagnostic pop
/* The two names that both headers give. */
enum { THEIR_NON_BLOCKING = CU_STREAM_NON_BLOCKING, THEIR_DISABLE_TIMING = CU_EVENT_DISABLE_TIMING };
#define CU_STREAM_NON_BLOCKING OUR_NON_BLOCKING
#define CU_EVENT_DISABLE_TIMING OUR_DISABLE_TIMING
#include "fabric/cuda/driver.h"

static int wrong;
static void same(const char *what, uint64_t ours, uint64_t theirs)
{
    if (ours != theirs) {
        fprintf(stderr, "driver.h: %s: %llu, cuda.h: %llu\n", what, (unsigned long long)ours, (unsigned long long)theirs);
        wrong++;
    }
}
#define SAME(ours, theirs) same(#ours, (uint64_t)(ours), (uint64_t)(theirs))
#define FIELD(our, a, their, b)                                                              \
    do {                                                                                     \
        same(#our "." #a " (offset)", offsetof(our, a), offsetof(their, b));                 \
        same(#our "." #a " (bytes)", sizeof((our *)0)->a, sizeof((their *)0)->b);            \
    } while (0)

static void test_values(void **state)
{
    (void)state;
    SAME(CU_OK, CUDA_SUCCESS);
    SAME(CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
    SAME(CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
    SAME(CU_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED);
    SAME(CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
    SAME(CU_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE);
    SAME(CU_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT);
    SAME(CU_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE);
    SAME(CU_NOT_FOUND, CUDA_ERROR_NOT_FOUND);
    SAME(CU_NOT_READY, CUDA_ERROR_NOT_READY);
    SAME(CU_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED);
    SAME(CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);

    SAME(CU_ATTR_COMPUTE_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    SAME(CU_ATTR_COMPUTE_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    SAME(CU_ATTR_SM_COUNT, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    SAME(CU_ATTR_COPY_ENGINES, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
    SAME(CU_ATTR_SHARED_PER_BLOCK_OPTIN, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    SAME(CU_ATTR_SHARED_PER_SM, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    SAME(CU_ATTR_L2_BYTES, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    SAME(CU_ATTR_VMM, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    SAME(CU_ATTR_HANDLE_FD, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    SAME(CU_ATTR_RDMA_VMM, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    SAME(CU_ATTR_STREAM_WAIT_64, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
    SAME(CU_ATTR_MULTICAST, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED);
    SAME(CU_P2P_ACCESS, CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
    SAME(CU_P2P_NATIVE_ATOMIC, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);

    SAME(CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
    SAME(CU_ALLOC_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
    SAME(CU_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    SAME(CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    SAME(CU_MEMORY_DEVICE, CU_MEMORYTYPE_DEVICE);
    SAME(CU_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    SAME(CU_COPY_PREFER_OVERLAP, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
    SAME(CU_OP_WAIT_32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
    SAME(CU_OP_WRITE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
    SAME(CU_OP_WAIT_64, CU_STREAM_MEM_OP_WAIT_VALUE_64);
    SAME(CU_OP_WRITE_64, CU_STREAM_MEM_OP_WRITE_VALUE_64);
    SAME(CU_OP_FLUSH, CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES);
    SAME(CU_WAIT_GEQ, CU_STREAM_WAIT_VALUE_GEQ);
    SAME(CU_WAIT_EQ, CU_STREAM_WAIT_VALUE_EQ);
    SAME(OUR_NON_BLOCKING, THEIR_NON_BLOCKING);
    SAME(OUR_DISABLE_TIMING, THEIR_DISABLE_TIMING);
    SAME(CU_HOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
    SAME(CU_HOSTALLOC_MAPPED, CU_MEMHOSTALLOC_DEVICEMAP);
    SAME(CU_FUNC_MAX_DYNAMIC_SHARED, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    SAME(CU_POINTER_CONTEXT, CU_POINTER_ATTRIBUTE_CONTEXT);
    SAME(CU_POINTER_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
    SAME(CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
    SAME(CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
    assert_int_equal(wrong, 0);
}

static void test_layouts(void **state)
{
    (void)state;
    SAME(sizeof(cu_result), sizeof(CUresult));
    SAME(sizeof(cu_dev), sizeof(CUdevice));
    SAME(sizeof(cu_ptr), sizeof(CUdeviceptr));
    SAME(sizeof(cu_handle), sizeof(CUmemGenericAllocationHandle));
    SAME(sizeof(cu_uuid), sizeof(CUuuid));

    SAME(sizeof(cu_location), sizeof(CUmemLocation));
    FIELD(cu_location, type, CUmemLocation, type);
    FIELD(cu_location, id, CUmemLocation, id);
    SAME(sizeof(cu_alloc_prop), sizeof(CUmemAllocationProp));
    FIELD(cu_alloc_prop, type, CUmemAllocationProp, type);
    FIELD(cu_alloc_prop, handle_types, CUmemAllocationProp, requestedHandleTypes);
    FIELD(cu_alloc_prop, location, CUmemAllocationProp, location);
    FIELD(cu_alloc_prop, win32, CUmemAllocationProp, win32HandleMetaData);
    FIELD(cu_alloc_prop, flags, CUmemAllocationProp, allocFlags);
    FIELD(cu_alloc_prop, flags.compression, CUmemAllocationProp, allocFlags.compressionType);
    FIELD(cu_alloc_prop, flags.rdma, CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
    FIELD(cu_alloc_prop, flags.usage, CUmemAllocationProp, allocFlags.usage);
    SAME(sizeof(cu_access), sizeof(CUmemAccessDesc));
    FIELD(cu_access, location, CUmemAccessDesc, location);
    FIELD(cu_access, flags, CUmemAccessDesc, flags);

    SAME(sizeof(cu_copy2d), sizeof(CUDA_MEMCPY2D));
    FIELD(cu_copy2d, src_x, CUDA_MEMCPY2D, srcXInBytes);
    FIELD(cu_copy2d, src_y, CUDA_MEMCPY2D, srcY);
    FIELD(cu_copy2d, src_type, CUDA_MEMCPY2D, srcMemoryType);
    FIELD(cu_copy2d, src_host, CUDA_MEMCPY2D, srcHost);
    FIELD(cu_copy2d, src_device, CUDA_MEMCPY2D, srcDevice);
    FIELD(cu_copy2d, src_array, CUDA_MEMCPY2D, srcArray);
    FIELD(cu_copy2d, src_pitch, CUDA_MEMCPY2D, srcPitch);
    FIELD(cu_copy2d, dst_x, CUDA_MEMCPY2D, dstXInBytes);
    FIELD(cu_copy2d, dst_y, CUDA_MEMCPY2D, dstY);
    FIELD(cu_copy2d, dst_type, CUDA_MEMCPY2D, dstMemoryType);
    FIELD(cu_copy2d, dst_host, CUDA_MEMCPY2D, dstHost);
    FIELD(cu_copy2d, dst_device, CUDA_MEMCPY2D, dstDevice);
    FIELD(cu_copy2d, dst_array, CUDA_MEMCPY2D, dstArray);
    FIELD(cu_copy2d, dst_pitch, CUDA_MEMCPY2D, dstPitch);
    FIELD(cu_copy2d, width, CUDA_MEMCPY2D, WidthInBytes);
    FIELD(cu_copy2d, height, CUDA_MEMCPY2D, Height);

    SAME(sizeof(cu_copy_attributes), sizeof(CUmemcpyAttributes));
    FIELD(cu_copy_attributes, src_access_order, CUmemcpyAttributes, srcAccessOrder);
    FIELD(cu_copy_attributes, src_hint, CUmemcpyAttributes, srcLocHint);
    FIELD(cu_copy_attributes, dst_hint, CUmemcpyAttributes, dstLocHint);
    FIELD(cu_copy_attributes, flags, CUmemcpyAttributes, flags);

    SAME(sizeof(cu_stream_op), sizeof(CUstreamBatchMemOpParams));
    FIELD(cu_stream_op, at.operation, CUstreamBatchMemOpParams, waitValue.operation);
    FIELD(cu_stream_op, at.address, CUstreamBatchMemOpParams, waitValue.address);
    FIELD(cu_stream_op, at.value, CUstreamBatchMemOpParams, waitValue.value64);
    FIELD(cu_stream_op, at.flags, CUstreamBatchMemOpParams, waitValue.flags);
    FIELD(cu_stream_op, at.alias, CUstreamBatchMemOpParams, waitValue.alias);
    FIELD(cu_stream_op, at.operation, CUstreamBatchMemOpParams, writeValue.operation);
    FIELD(cu_stream_op, at.address, CUstreamBatchMemOpParams, writeValue.address);
    FIELD(cu_stream_op, at.value, CUstreamBatchMemOpParams, writeValue.value64);
    FIELD(cu_stream_op, at.flags, CUstreamBatchMemOpParams, writeValue.flags);

    SAME(sizeof(cu_multicast_prop), sizeof(CUmulticastObjectProp));
    FIELD(cu_multicast_prop, n_devices, CUmulticastObjectProp, numDevices);
    FIELD(cu_multicast_prop, size, CUmulticastObjectProp, size);
    FIELD(cu_multicast_prop, handle_types, CUmulticastObjectProp, handleTypes);
    FIELD(cu_multicast_prop, flags, CUmulticastObjectProp, flags);
    assert_int_equal(wrong, 0);
}

/* cuda.h maps a function's plain name to the one that has the signature it declares: ours must be that one. */
static void test_names(void **state)
{
    static const char *const theirs[] = {
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
        TEXT(cuDeviceGetUuid), TEXT(cuDeviceTotalMem), TEXT(cuDevicePrimaryCtxRelease), TEXT(cuCtxPushCurrent),
        TEXT(cuCtxPopCurrent), TEXT(cuMemAlloc), TEXT(cuMemFree), TEXT(cuMemHostGetDevicePointer), TEXT(cuMemcpy2DAsync),
        TEXT(cuMemcpyDtoHAsync), TEXT(cuMemcpyHtoDAsync), TEXT(cuStreamDestroy), TEXT(cuStreamBatchMemOp),
        TEXT(cuEventDestroy), TEXT(cuMemcpyBatchAsync), TEXT(cuMemcpyAsync), TEXT(cuLaunchKernel), TEXT(cuEventRecord),
        TEXT(cuStreamWaitEvent), TEXT(cuMemHostAlloc)};
    (void)state;
    for (size_t i = 0; i < sizeof theirs / sizeof theirs[0]; i++) {
        const char *ours = NULL;
        size_t base = strcspn(theirs[i], "_");
#define X(field, name, parameters)                                                     \
    if (strncmp(name, theirs[i], base) == 0 && (name[base] == '\0' || name[base] == '_')) \
        ours = name;
        CUDA_DRIVER(X) CUDA_DRIVER_OPTIONAL(X)
#undef X
        if (!ours || strcmp(ours, theirs[i]) != 0) {
            fprintf(stderr, "driver.h: %s, cuda.h: %s\n", ours ? ours : "none", theirs[i]);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values), cmocka_unit_test(test_layouts),
                                       cmocka_unit_test(test_names)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#else
static void test_nothing(void **state)
{
    (void)state;
    printf("not run: cuda.h is not installed: driver.h is not compared with it\n");
    skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
#endif
