// What MLX gives to a kernel of its user on CUDA, as far as the kernels need it.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cuda/std/array>

namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}  // namespace mlx::core::cu
