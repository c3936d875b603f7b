// The words of the bodies in CUDA's language.
#define FN __device__ __forceinline__
#define GLOBAL
#define LOCAL_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define UNROLL _Pragma("unroll")
#define BARRIER __syncthreads()
#define DEVICE_BARRIER __syncthreads()
#define SHUFFLE_XOR(number, other) __shfl_xor_sync(0xffffffffu, number, other)
#define READ(type, from) __ldg(reinterpret_cast<const type*>(from))
// Hides how a pointer was computed, so that it is not computed anew from indexes at each use.
#define KEEP(pointer) asm volatile("" : "+l"(pointer))
#define EXP2(number) exp2f(number)
#define LOG2(number) log2f(number)
#define AS_FLOAT(bits) __uint_as_float(uint32_t(bits))
#define AS_UINT(number) __float_as_uint(float(number))
#define FROM_BITS(type, bits) from_bits<type>(uint16_t(bits))
#define AS_ON_GPU 1

template <typename T>
FN T from_bits(uint16_t bits) {
  return *reinterpret_cast<const T*>(&bits);
}

// (word & mask) | 2^23 as one operation.
#define MASKED(word, mask) masked(word, mask, 0x4B000000u)

FN uint32_t masked(uint32_t word, uint32_t mask, uint32_t rest) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(rest));
  return found;
}

// A product of matrices of 16 by 16 and 16 by 8 numbers, added to `sum`; see matrix_splits.h.
#define PERMUTE(one, other, places) __byte_perm(one, other, places)
#define PAIR(is_bfloat, low, high) pair_of_floats<is_bfloat>(low, high)
#define PAIR_SUM(pair) pair_sum(pair)
#define NIBBLES(word) masked(word, 0x000F000Fu, 0x64006400u)

template <int IS_BFLOAT>
FN uint32_t pair_of_floats(float low, float high) {
  if constexpr (IS_BFLOAT) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

FN float pair_sum(uint32_t pair) {
  const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  return both.x + both.y;
}

template <int IS_BFLOAT, typename FIRST, typename SECOND>
FN void multiply(FIRST first, SECOND second, float (&sum)[4]) {
  if constexpr (IS_BFLOAT) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(first.at[0]), "r"(first.at[1]), "r"(first.at[2]), "r"(first.at[3]),
          "r"(second.at[0]), "r"(second.at[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(first.at[0]), "r"(first.at[1]), "r"(first.at[2]), "r"(first.at[3]),
          "r"(second.at[0]), "r"(second.at[1]));
  }
}
