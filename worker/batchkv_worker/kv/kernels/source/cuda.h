// The words of the bodies in CUDA's language.
#define FN __device__ __forceinline__
#define FN_APART __device__ __noinline__
#define GLOBAL
#define LOCAL_ARRAY(type, name, count) __shared__ __align__(16) type name[count]
#define UNROLL _Pragma("unroll")
#define UNROLL_4 _Pragma("unroll 4")
#define BARRIER __syncthreads()
#define DEVICE_BARRIER __syncthreads()
#define SHUFFLE_XOR(number, other) __shfl_xor_sync(0xffffffffu, number, other)
#define ANY(flag) __any_sync(0xffffffffu, flag)
#define LOCAL
#define SIMD_BARRIER __syncwarp()
#define READ_AS(is_local, type, from) read_as<is_local>(reinterpret_cast<const type*>(from))
#define READ(type, from) __ldg(reinterpret_cast<const type*>(from))
// Hides how a pointer was computed, so that it is not computed anew from indexes at each use.
#define KEEP(pointer) asm volatile("" : "+l"(pointer))
#define EXP2(number) fast_exp2(number)
#define LOG2(number) fast_log2(number)
#define ROOT(number) sqrtf(number)
#define SINE_COSINE(number, sine, cosine) sincosf(number, &sine, &cosine)
#define AS_FLOAT(bits) __uint_as_float(uint32_t(bits))
#define AS_UINT(number) __float_as_uint(float(number))
#define FROM_BITS(type, bits) from_bits<type>(uint16_t(bits))
#define TO_BITS(type, number) to_bits(static_cast<type>(number))
#define LOWER(type, word) lower_half<type>(word)
#define UPPER(type, word) upper_half<type>(word)
#define ADD_ONE(counter) atomicAdd(counter, 1u)
// Counts a threadgroup; whether it is the last of so many, and then the counter is zero again. MLX
// gives inputs as constants.
#define IS_LAST(counter, number) \
  (atomicInc(const_cast<uint32_t*>(counter), (number) - 1u) == (number) - 1u ? 1u : 0u)
#define ALL_SEE __threadfence()
// Past the first cache, which may have what was there before others wrote.
#define SEEN(number) __ldcg(number)
#define AS_ON_GPU 1
#define READS_WIDE 1
#define IS_ALIGNED(pointer, bytes) (uint64_t(pointer) % (bytes) == 0)
#define GIVEN_BACK(T, scale, code, bias) ((scale) * static_cast<T>(float(code)) + (bias))

template <typename T>
FN T from_bits(uint16_t bits) {
  return *reinterpret_cast<const T*>(&bits);
}

template <typename T>
FN uint16_t to_bits(T number) {
  return *reinterpret_cast<const uint16_t*>(&number);
}

template <int IS_LOCAL, typename N>
FN N read_as(const N* from) {
  if constexpr (IS_LOCAL) {
    return *from;
  } else {
    return __ldg(from);
  }
}

// Copies from memory of the device to that of the threadgroup, in the background: zeros if not
// `is_there`. The copies since the last END_COPIES are waited for together; all but the last `rest`
// of such groups.
#define COPY_WORDS(count, to, from, is_there) copy_words<count>(to, from, is_there)
#define END_COPIES asm volatile("cp.async.commit_group;" ::: "memory");
#define WAIT_FOR_COPIES(rest) asm volatile("cp.async.wait_group %0;" ::"n"(rest) : "memory")

template <int COUNT>
FN void copy_words(uint32_t* to, const uint32_t* from, bool is_there) {
  const uint32_t place = uint32_t(__cvta_generic_to_shared(to));
  const uint32_t size = is_there ? 4 * COUNT : 0;
  if constexpr (COUNT == 4) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(size)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from),
                 "n"(4 * COUNT), "r"(size)
                 : "memory");
  }
}

// Without what exp2f and log2f do for numbers below 2^-126, which are zeros here.
FN float fast_exp2(float number) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
  return found;
}

FN float fast_log2(float number) {
  float found;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(number));
  return found;
}

// The numbers of 2 bytes in a word: of bfloat16 as one operation.
template <typename T>
FN float lower_half(uint32_t word) {
  return float(from_bits<T>(uint16_t(word)));
}

template <>
FN float lower_half<__nv_bfloat16>(uint32_t word) {
  return __uint_as_float(word << 16);
}

template <typename T>
FN float upper_half(uint32_t word) {
  return float(from_bits<T>(uint16_t(word >> 16)));
}

template <>
FN float upper_half<__nv_bfloat16>(uint32_t word) {
  return __uint_as_float(word & 0xFFFF0000u);
}

// (word & mask) | 2^23 as one operation.
#define MASKED(word, mask) masked(word, mask, 0x4B000000u)

FN uint32_t masked(uint32_t word, uint32_t mask, uint32_t rest) {
  uint32_t found;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(rest));
  return found;
}

// Pairs of numbers of 2 bytes; see matrix_splits.h and pairs.h.
#define PERMUTE(one, other, places) __byte_perm(one, other, places)
#define PAIR(is_bfloat, low, high) pair_of_floats<is_bfloat>(low, high)
#define TRANSPOSED(pair) transposed(pair)

// Transposes 8 by 8 numbers of 2 bytes, of which each thread has two of a row.
FN uint32_t transposed(uint32_t pair) {
  uint32_t found;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(pair));
  return found;
}

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

// `sum` is `start` and a product of matrices of 16 by 16 and 16 by 8 numbers; see matrix_splits.h.
template <int IS_BFLOAT, typename FIRST, typename SECOND>
FN void multiply(FIRST first, SECOND second, const float (&start)[4], float (&sum)[4]) {
  if constexpr (IS_BFLOAT) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(first.at[0]), "r"(first.at[1]), "r"(first.at[2]), "r"(first.at[3]),
          "r"(second.at[0]), "r"(second.at[1]),
          "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
        : "r"(first.at[0]), "r"(first.at[1]), "r"(first.at[2]), "r"(first.at[3]),
          "r"(second.at[0]), "r"(second.at[1]),
          "f"(start[0]), "f"(start[1]), "f"(start[2]), "f"(start[3]));
  }
}
