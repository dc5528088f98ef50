/*
 * image.c - the kernels' fatbin inside the library. The Makefile names the file where nvcc could make it.
 */
#include "fabric/cuda/kernels/kernels.h"

#ifdef TIDE_CUDA_IMAGE
extern const unsigned char tide_cuda_image[] __attribute__((visibility("hidden")));
extern const unsigned char tide_cuda_image_end[] __attribute__((visibility("hidden")));
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".hidden tide_cuda_image\n"
        ".hidden tide_cuda_image_end\n"
        ".global tide_cuda_image\n"
        ".global tide_cuda_image_end\n"
        "tide_cuda_image:\n"
        ".incbin \"" TIDE_CUDA_IMAGE "\"\n"
        "tide_cuda_image_end:\n"
        ".byte 0\n"
        ".popsection\n");

const void *cuda_image(size_t *n_bytes)
{
    *n_bytes = (size_t)(tide_cuda_image_end - tide_cuda_image);
    return tide_cuda_image;
}
#else
const void *cuda_image(size_t *n_bytes)
{
    *n_bytes = 0;
    return "";
}
#endif
