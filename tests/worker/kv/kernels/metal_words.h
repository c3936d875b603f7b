// Metal's words as clang's C++ reads them: the address spaces are types, and the rest is declared.
// Nothing here computes: this is for -fsyntax-only.
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned short ushort;
typedef unsigned int uint32_t;
typedef unsigned int uint;
typedef int int32_t;
typedef long int64_t;
typedef __fp16 float16_t;
typedef __fp16 bfloat16_t;  // another number of two bytes

#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define kernel

typedef uint uint2 __attribute__((ext_vector_type(2)));
typedef uint uint3 __attribute__((ext_vector_type(3)));
typedef uint uint4 __attribute__((ext_vector_type(4)));

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };
void threadgroup_barrier(mem_flags flags);
template <typename N>
N simd_shuffle_xor(N data, ushort mask);
template <typename N>
N extract_bits(N number, uint offset, uint bits);
template <typename N>
N min(N one, N other);
template <typename N>
N max(N one, N other);
template <typename N>
N abs(N number);
template <typename N>
N floor(N number);
template <typename N>
N ceil(N number);
template <typename N>
N round(N number);
enum memory_order { memory_order_relaxed };
struct atomic_uint {};
template <typename COUNTER>
uint atomic_fetch_add_explicit(COUNTER* counter, uint number, memory_order order);
namespace fast {
float exp2(float number);
}
namespace precise {
float log2(float number);
float sqrt(float number);
float cos(float number);
float sin(float number);
}
}  // namespace metal

template <typename TO, typename FROM>
TO as_type(FROM from) {
  static_assert(sizeof(TO) == sizeof(FROM), "as_type keeps the size");
  TO to;
  __builtin_memcpy(&to, &from, sizeof(TO));
  return to;
}
