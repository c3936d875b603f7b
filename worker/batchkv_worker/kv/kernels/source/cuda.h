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
#define ROUND(number) roundf(number)
#define HIGHEST_START 0.0f

template <typename T>
FN T from_bits(uint16_t bits) {
  return *reinterpret_cast<const T*>(&bits);
}

// 2^23 has its last bit at 1, so a code in its low bits needs no conversion. As a register, it is
// loaded once.
FN uint32_t two_to_23() {
  uint32_t bits;
  asm("mov.b32 %0, 0x4B000000;" : "=r"(bits));
  return bits;
}

template <int BITS>
FN float code_number(uint32_t word, int place) {
  if constexpr (BITS == 8) {
    return __uint_as_float(__byte_perm(word, two_to_23(), 0x7650 + place / 8)) - 8388608.0f;
  } else {
    return __uint_as_float(((word >> place) & ((1u << BITS) - 1)) | two_to_23()) - 8388608.0f;
  }
}
