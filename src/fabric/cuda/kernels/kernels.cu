/*
 * kernels.cu - the entries: names that the host side asks for, each with its struct as a constant parameter.
 */
#include "fabric/cuda/kernels/copy.cuh"
#include "fabric/cuda/kernels/multimem.cuh"
#include "fabric/cuda/kernels/reduce.cuh"

enum { PLAIN_THREADS = 32 * KERNEL_PLAIN_WARPS };

#define ENTRY(threads, name, type, call)                                                                  \
    extern "C" __global__ void __launch_bounds__(threads) tide_##name(const __grid_constant__ type p) \
    {                                                                                                     \
        call(p);                                                                                          \
    }

#define REDUCES(suffix, dtype)                                                                            \
    ENTRY(PLAIN_THREADS, reduce_plain_##suffix, kernel_reduce, reduce_plain<dtype>)                       \
    ENTRY(32 * KERNEL_THIN_WARPS, reduce_thin_##suffix, kernel_reduce, (reduce_ring<dtype, KERNEL_THIN_SLOT, false>))    \
    ENTRY(32 * KERNEL_THIN_ADD_WARPS, reduce_thin_add_##suffix, kernel_reduce, (reduce_ring<dtype, KERNEL_THIN_SLOT, true>)) \
    ENTRY(32 * KERNEL_FAT_WARPS, reduce_fat_##suffix, kernel_reduce, (reduce_ring<dtype, KERNEL_FAT_SLOT, false>))      \
    ENTRY(32 * KERNEL_FAT_ADD_WARPS, reduce_fat_add_##suffix, kernel_reduce, (reduce_ring<dtype, KERNEL_FAT_SLOT, true>))

REDUCES(f32, TIDE_F32)
REDUCES(bf16, TIDE_BF16)
REDUCES(f16, TIDE_F16)

ENTRY(PLAIN_THREADS, copy_plain, kernel_copy, copy_plain)
ENTRY(32 * KERNEL_COPY_WARPS, copy_bulk, kernel_copy, copy_bulk)
ENTRY(PLAIN_THREADS, cast_f32_bf16, kernel_copy, (copy_cast<TIDE_F32, TIDE_BF16>))
ENTRY(PLAIN_THREADS, cast_f32_f16, kernel_copy, (copy_cast<TIDE_F32, TIDE_F16>))
ENTRY(PLAIN_THREADS, cast_bf16_f32, kernel_copy, (copy_cast<TIDE_BF16, TIDE_F32>))
ENTRY(PLAIN_THREADS, cast_bf16_f16, kernel_copy, (copy_cast<TIDE_BF16, TIDE_F16>))
ENTRY(PLAIN_THREADS, cast_f16_f32, kernel_copy, (copy_cast<TIDE_F16, TIDE_F32>))
ENTRY(PLAIN_THREADS, cast_f16_bf16, kernel_copy, (copy_cast<TIDE_F16, TIDE_BF16>))

ENTRY(PLAIN_THREADS, multimem_reduce, kernel_multimem, multimem_reduce)

/* The host side finds all of them. */
template <typename ARGUMENTS> __host__ __device__ constexpr bool is_entry(void (*)(ARGUMENTS)) { return true; }
#define KERNEL_X(id, name, type) static_assert(is_entry<const type>(name), "an entry of this name, with this struct");
KERNELS(KERNEL_X)
#undef KERNEL_X
