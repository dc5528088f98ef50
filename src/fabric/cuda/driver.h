/*
 * driver.h - the CUDA driver as a table of functions, loaded at run time: no CUDA header and no CUDA library is needed to
 * build. What is declared here has the driver's layout and values; a test compares it with cuda.h where that is installed.
 *
 * Tests put a fake under the table. Nothing in this folder calls the driver by another way.
 */
#ifndef TIDE_CUDA_DRIVER_H
#define TIDE_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int cu_result; /* CU_SUCCESS is 0 */
typedef int cu_dev;
typedef unsigned long long cu_ptr, cu_handle;
typedef struct cu_context *cu_context;
typedef struct cu_stream *cu_stream;
typedef struct cu_event *cu_event;
typedef struct cu_module *cu_module;
typedef struct cu_function *cu_function;

enum {
    CU_OK = 0,
    CU_INVALID_VALUE = 1,
    CU_OUT_OF_MEMORY = 2,
    CU_NOT_INITIALIZED = 3,
    CU_NO_DEVICE = 100,
    CU_INVALID_DEVICE = 101,
    CU_INVALID_CONTEXT = 201,
    CU_INVALID_HANDLE = 400,
    CU_NOT_FOUND = 500,
    CU_NOT_READY = 600,
    CU_NOT_PERMITTED = 800,
    CU_NOT_SUPPORTED = 801,
    CU_CAPTURE_IMPLICIT = 906 /* the legacy stream, while another one of the context is being captured */
};

/* Attributes of a device. */
enum {
    CU_ATTR_COMPUTE_MAJOR = 75,
    CU_ATTR_COMPUTE_MINOR = 76,
    CU_ATTR_SM_COUNT = 16,
    CU_ATTR_COPY_ENGINES = 40,
    CU_ATTR_SHARED_PER_BLOCK_OPTIN = 97,
    CU_ATTR_SHARED_PER_SM = 81,
    CU_ATTR_L2_BYTES = 38,
    CU_ATTR_VMM = 102,
    CU_ATTR_HANDLE_FD = 103,
    CU_ATTR_RDMA_VMM = 110,
    CU_ATTR_STREAM_WAIT_64 = 122,
    CU_ATTR_MULTICAST = 132
};
enum { CU_P2P_ACCESS = 2, CU_P2P_NATIVE_ATOMIC = 3 }; /* cuDeviceGetP2PAttribute */

typedef struct cu_uuid { char bytes[16]; } cu_uuid;

typedef struct cu_location { int type, id; } cu_location; /* type 1: device */
enum { CU_LOCATION_DEVICE = 1 };
typedef struct cu_alloc_prop {
    int type;             /* 1: pinned */
    int handle_types;     /* 1: POSIX file descriptor */
    cu_location location;
    void *win32;
    struct {
        unsigned char compression, rdma;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} cu_alloc_prop;
enum { CU_ALLOC_PINNED = 1, CU_HANDLE_FD = 1 };
typedef struct cu_access { cu_location location; int flags; } cu_access; /* flags 3: read and write */
enum { CU_ACCESS_READ_WRITE = 3 };

typedef struct cu_copy2d {
    size_t src_x, src_y;
    int src_type;
    const void *src_host;
    cu_ptr src_device;
    void *src_array;
    size_t src_pitch;
    size_t dst_x, dst_y;
    int dst_type;
    void *dst_host;
    cu_ptr dst_device;
    void *dst_array;
    size_t dst_pitch;
    size_t width, height; /* bytes, rows */
} cu_copy2d;
enum { CU_MEMORY_DEVICE = 2 };

typedef struct cu_copy_attributes {
    int src_access_order; /* 1: in stream order */
    cu_location src_hint, dst_hint;
    unsigned flags;       /* 1: prefer overlap with compute */
} cu_copy_attributes;
enum { CU_ORDER_STREAM = 1, CU_COPY_PREFER_OVERLAP = 1 };

/* One operation of cuStreamBatchMemOp. */
enum { CU_OP_WAIT_32 = 1, CU_OP_WRITE_32 = 2, CU_OP_WAIT_64 = 4, CU_OP_WRITE_64 = 5, CU_OP_FLUSH = 3 };
enum { CU_WAIT_GEQ = 0, CU_WAIT_EQ = 1 };
typedef union cu_stream_op {
    struct {
        int operation;
        cu_ptr address;
        uint64_t value;
        unsigned flags;
        cu_ptr alias;
    } at; /* WAIT and WRITE have one layout */
    uint64_t pad[6];
} cu_stream_op;

enum { CU_STREAM_NON_BLOCKING = 1, CU_EVENT_DISABLE_TIMING = 2, CU_HOSTALLOC_PORTABLE = 1, CU_HOSTALLOC_MAPPED = 2 };
enum { CU_FUNC_MAX_DYNAMIC_SHARED = 8, CU_FUNC_SHARED_CARVEOUT = 9 }; /* the latter in percent */
enum { CU_POINTER_CONTEXT = 1, CU_POINTER_MEMORY_TYPE = 2, CU_POINTER_DEVICE_ORDINAL = 9 };
enum { CU_CAPTURE_NONE = 0 };

enum { CU_MULTICAST_MINIMUM = 0 }; /* granularity */
typedef struct cu_multicast_prop {
    unsigned n_devices;
    size_t size;
    unsigned long long handle_types, flags;
} cu_multicast_prop;

/* X(field, exported name, parameters). Exported names carry the version suffix of the signature given here. */
#define CUDA_DRIVER(X)                                                                                                 \
    X(Init, "cuInit", (unsigned flags))                                                                                \
    X(DriverGetVersion, "cuDriverGetVersion", (int *version))                                                          \
    X(GetErrorName, "cuGetErrorName", (cu_result error, const char **name))                                            \
    X(GetErrorString, "cuGetErrorString", (cu_result error, const char **text))                                        \
    X(DeviceGet, "cuDeviceGet", (cu_dev *device, int ordinal))                                                         \
    X(DeviceGetCount, "cuDeviceGetCount", (int *count))                                                                \
    X(DeviceGetName, "cuDeviceGetName", (char *name, int bytes, cu_dev device))                                        \
    X(DeviceGetUuid, "cuDeviceGetUuid_v2", (cu_uuid *uuid, cu_dev device))                                             \
    X(DeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *bytes, cu_dev device))                                           \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, cu_dev device))                          \
    X(DeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int *can, cu_dev device, cu_dev peer))                            \
    X(DeviceGetP2PAttribute, "cuDeviceGetP2PAttribute", (int *value, int attribute, cu_dev from, cu_dev to))           \
    X(PrimaryRetain, "cuDevicePrimaryCtxRetain", (cu_context * context, cu_dev device))                                \
    X(PrimaryRelease, "cuDevicePrimaryCtxRelease_v2", (cu_dev device))                                                 \
    X(CtxPush, "cuCtxPushCurrent_v2", (cu_context context))                                                            \
    X(CtxPop, "cuCtxPopCurrent_v2", (cu_context * context))                                                            \
    X(CtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                           \
    X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                                    \
      (size_t * bytes, const cu_alloc_prop *prop, int option))                                                         \
    X(MemCreate, "cuMemCreate",                                                                                        \
      (cu_handle * handle, size_t bytes, const cu_alloc_prop *prop, unsigned long long flags))                         \
    X(MemRelease, "cuMemRelease", (cu_handle handle))                                                                  \
    X(MemAddressReserve, "cuMemAddressReserve",                                                                        \
      (cu_ptr * address, size_t bytes, size_t alignment, cu_ptr hint, unsigned long long flags))                       \
    X(MemAddressFree, "cuMemAddressFree", (cu_ptr address, size_t bytes))                                              \
    X(MemMap, "cuMemMap",                                                                                              \
      (cu_ptr address, size_t bytes, size_t offset, cu_handle handle, unsigned long long flags))                       \
    X(MemUnmap, "cuMemUnmap", (cu_ptr address, size_t bytes))                                                          \
    X(MemSetAccess, "cuMemSetAccess", (cu_ptr address, size_t bytes, const cu_access *access, size_t count))           \
    X(MemExport, "cuMemExportToShareableHandle",                                                                       \
      (void *fd, cu_handle handle, int type, unsigned long long flags))                                                \
    X(MemImport, "cuMemImportFromShareableHandle", (cu_handle * handle, void *fd, int type))                           \
    X(MemAlloc, "cuMemAlloc_v2", (cu_ptr * address, size_t bytes))                                                     \
    X(MemFree, "cuMemFree_v2", (cu_ptr address))                                                                       \
    X(MemHostAlloc, "cuMemHostAlloc", (void **host, size_t bytes, unsigned flags))                                     \
    X(MemFreeHost, "cuMemFreeHost", (void *host))                                                                      \
    X(MemHostGetDevicePointer, "cuMemHostGetDevicePointer_v2", (cu_ptr * address, void *host, unsigned flags))         \
    X(PointerGetAttribute, "cuPointerGetAttribute", (void *value, int attribute, cu_ptr address))                      \
    X(MemcpyAsync, "cuMemcpyAsync", (cu_ptr dst, cu_ptr src, size_t bytes, cu_stream stream))                          \
    X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const cu_copy2d *copy, cu_stream stream))                                  \
    X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *dst, cu_ptr src, size_t bytes, cu_stream stream))                \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (cu_ptr dst, const void *src, size_t bytes, cu_stream stream))          \
    X(MemsetD8Async, "cuMemsetD8Async", (cu_ptr dst, unsigned char value, size_t bytes, cu_stream stream))             \
    X(MemsetD2D8Async, "cuMemsetD2D8Async",                                                                            \
      (cu_ptr dst, size_t pitch, unsigned char value, size_t width, size_t height, cu_stream stream))                  \
    X(StreamCreate, "cuStreamCreateWithPriority", (cu_stream * stream, unsigned flags, int priority))                  \
    X(StreamDestroy, "cuStreamDestroy_v2", (cu_stream stream))                                                         \
    X(StreamSynchronize, "cuStreamSynchronize", (cu_stream stream))                                                    \
    X(StreamQuery, "cuStreamQuery", (cu_stream stream))                                                                \
    X(StreamWaitEvent, "cuStreamWaitEvent", (cu_stream stream, cu_event event, unsigned flags))                        \
    X(StreamBatchMemOp, "cuStreamBatchMemOp_v2",                                                                       \
      (cu_stream stream, unsigned count, cu_stream_op *ops, unsigned flags))                                           \
    X(StreamIsCapturing, "cuStreamIsCapturing", (cu_stream stream, int *status))                                       \
    X(EventCreate, "cuEventCreate", (cu_event * event, unsigned flags))                                                \
    X(EventDestroy, "cuEventDestroy_v2", (cu_event event))                                                             \
    X(EventRecord, "cuEventRecord", (cu_event event, cu_stream stream))                                                \
    X(EventQuery, "cuEventQuery", (cu_event event))                                                                    \
    X(EventElapsedTime, "cuEventElapsedTime", (float *ms, cu_event start, cu_event end))                               \
    X(ModuleLoadData, "cuModuleLoadData", (cu_module * module, const void *image))                                     \
    X(ModuleUnload, "cuModuleUnload", (cu_module module))                                                              \
    X(ModuleGetFunction, "cuModuleGetFunction", (cu_function * function, cu_module module, const char *name))          \
    X(FuncSetAttribute, "cuFuncSetAttribute", (cu_function function, int attribute, int value))                        \
    X(LaunchKernel, "cuLaunchKernel",                                                                                  \
      (cu_function function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,             \
       unsigned shared, cu_stream stream, void **parameters, void **extra))
/* Newer than the oldest driver that will do: NULL when the driver has it not. */
#define CUDA_DRIVER_OPTIONAL(X)                                                                                        \
    X(MemcpyBatchAsync, "cuMemcpyBatchAsync_v2",                                                                       \
      (cu_ptr * dsts, cu_ptr * srcs, size_t *bytes, size_t count, cu_copy_attributes *attributes,                      \
       size_t *first_of_attribute, size_t n_attributes, cu_stream stream))                                             \
    X(MulticastGetGranularity, "cuMulticastGetGranularity",                                                            \
      (size_t * bytes, const cu_multicast_prop *prop, int option))                                                     \
    X(MulticastCreate, "cuMulticastCreate", (cu_handle * handle, const cu_multicast_prop *prop))                       \
    X(MulticastAddDevice, "cuMulticastAddDevice", (cu_handle handle, cu_dev device))                                   \
    X(MulticastBindMem, "cuMulticastBindMem",                                                                          \
      (cu_handle handle, size_t offset, cu_handle memory, size_t memory_offset, size_t bytes,                          \
       unsigned long long flags))                                                                                      \
    X(MulticastUnbind, "cuMulticastUnbind", (cu_handle handle, cu_dev device, size_t offset, size_t bytes))

typedef struct cuda_driver {
#define CUDA_X(field, name, parameters) cu_result(*field) parameters;
    CUDA_DRIVER(CUDA_X) CUDA_DRIVER_OPTIONAL(CUDA_X)
#undef CUDA_X
    int version; /* 13000: 13.0 */
} cuda_driver;

/* The machine's driver, initialized; loaded once a process and kept. TIDE_ERR_UNSUPPORTED says what is missing: no
 * libcuda.so.1, a missing function, too old a version (both numbers), no device. */
int cuda_driver_get(const cuda_driver **out);
/* Tests: stands in for the machine's driver until it is set to NULL. */
void cuda_driver_fake(const cuda_driver *driver);
/* A stream of this process stands still on the GPU for good. Whatever waits for the whole GPU would not return any more:
 * freeing memory that streams have been able to use all along, unloading code, ending the context. It is left undone. */
void cuda_gpu_give_up(cu_dev gpu);
bool cuda_gpu_given_up(cu_dev gpu);
/* Devices of this process with streams on the GPU of which that may yet be found out. */
void cuda_gpu_unsettle(cu_dev gpu, int by); /* 1, -1 */
bool cuda_gpu_unsettled(cu_dev gpu);
/* TIDE_OK, or TIDE_ERR_* with "what: CUDA_ERROR_NAME (text)". */
int cuda_check(const cuda_driver *driver, cu_result result, const char *what);

#endif
