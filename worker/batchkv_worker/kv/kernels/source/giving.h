// Numbers that packed ones give back. A dialect defines GIVEN_BACK as its mx.dequantize computes it.

// The part of a row's prefix that a KV head has of a column, and the step between its numbers.
#define OF_PREFIX(part, strides) \
  part + prefix * int64_t(strides[0]) + head * int64_t(strides[1]) + GROUP_Z * int64_t(strides[2]), int64_t(strides[3])

// Numbers 8 * unit and so on of one vector of affine codes, which lie in one piece. Scales and biases
// need not.
template <typename T, int BITS, int GROUP>
FN Eight give_eight(
    const GLOBAL uint32_t* codes, int64_t, const GLOBAL T* scales, int64_t scale_step,
    const GLOBAL T* biases, int64_t bias_step, int unit) {
  const int first = unit * BITS;  // byte
  const int group = unit * 8 / GROUP;
  const T scale = scales[group * scale_step];
  const T bias = biases[group * bias_step];
  constexpr int NUM = (8 * BITS + 31) / 32;
  const Words<NUM> run = load_run<8, BITS, 1>(codes + first / 4, 8 * (first % 4));
  Eight given;
  UNROLL for (int i = 0; i < 8; i++) {
    const int word = i * BITS / 32;
    const int shift = i * BITS % 32;
    uint32_t code = run.at[word] >> shift;
    if (shift + BITS > 32) {
      code |= run.at[word + 1 < NUM ? word + 1 : word] << (32 - shift);
    }
    code &= (1u << BITS) - 1;
    given.at[i] = float(GIVEN_BACK(T, scale, code, bias));
  }
  return given;
}
