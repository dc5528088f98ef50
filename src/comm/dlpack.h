/* dlpack.h - the ABI of DLPack 0.8 as far as a 1-D tensor needs it: declared here, so that nothing has to be installed.
 */
#ifndef TIDE_DLPACK_H
#define TIDE_DLPACK_H

#include <stdint.h>

enum { DLPACK_CPU = 1, DLPACK_CUDA = 2 };                      /* DLDeviceType */
enum { DLPACK_UINT = 1, DLPACK_FLOAT = 2, DLPACK_BFLOAT = 4 }; /* DLDataTypeCode */

typedef struct DLDevice {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct DLDataType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* NULL: compact */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

#endif
