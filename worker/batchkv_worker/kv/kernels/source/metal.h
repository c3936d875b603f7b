// The words of the bodies in Metal's language.
using namespace metal;
#define FN inline
#define FN_APART inline
#define GLOBAL device
#define LOCAL threadgroup
#define LOCAL_ARRAY(type, name, count) alignas(16) threadgroup type name[count]
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_4
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
#define DEVICE_BARRIER threadgroup_barrier(mem_flags::mem_device)
#define SHUFFLE_XOR(number, other) simd_shuffle_xor(number, ushort(other))
#define READ(type, from) (*(const GLOBAL type*)(from))
#define READ_AS(is_local, type, from) READ(type, from)
#define KEEP(pointer)
#define MASKED(word, mask) (((word) & (mask)) | 0x4B000000u)
#define EXP2(number) fast::exp2(number)
#define LOG2(number) precise::log2(number)
#define ROOT(number) precise::sqrt(number)
#define SINE_COSINE(number, sine, cosine) (sine = precise::sin(number), cosine = precise::cos(number))
#define AS_FLOAT(bits) as_type<float>(uint32_t(bits))
#define AS_UINT(number) as_type<uint32_t>(float(number))
#define FROM_BITS(type, bits) as_type<type>(uint16_t(bits))
#define TO_BITS(type, number) as_type<uint16_t>(static_cast<type>(number))
#define LOWER(type, word) float(FROM_BITS(type, word))
#define UPPER(type, word) float(FROM_BITS(type, (word) >> 16))
#define ADD_ONE(counter) \
  atomic_fetch_add_explicit((LOCAL atomic_uint*)(counter), 1u, memory_order_relaxed)
#define AS_ON_GPU 1
// Numbers are read one by one: no Metal compiler has tried for us where an array begins.
#define READS_WIDE 0
#define IS_ALIGNED(pointer, bytes) false
#define GIVEN_BACK(T, scale, code, bias) ((scale) * static_cast<T>(code) + (bias))
