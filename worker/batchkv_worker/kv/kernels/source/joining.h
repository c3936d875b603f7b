// Words of scales, as records have them.

// The bits of a number of 1, 2 or 4 bytes.
template <typename NUMBER>
FN uint32_t bits_of(const GLOBAL NUMBER* numbers, int place) {
  if constexpr (sizeof(NUMBER) == 4) {
    return AS_UINT(numbers[place]);
  } else if constexpr (sizeof(NUMBER) == 2) {
    return ((const GLOBAL uint16_t*)numbers)[place];
  } else {
    return ((const GLOBAL uint8_t*)numbers)[place];
  }
}

template <typename T>
FN uint32_t join_pair(const GLOBAL T* scales, const GLOBAL T* biases, int word) {
  if constexpr (sizeof(T) == 4) {
    return bits_of(word % 2 ? biases : scales, word / 2);
  } else {
    return bits_of(scales, word) | (bits_of(biases, word) << 16);
  }
}

// The last word is filled up with zeros.
template <typename NUMBER>
FN uint32_t join_scales(const GLOBAL NUMBER* scales, int word, int groups) {
  constexpr int IN_WORD = 4 / sizeof(NUMBER);
  uint32_t bits = 0;
  UNROLL for (int i = 0; i < IN_WORD; i++) {
    const int group = word * IN_WORD + i;
    if (group < groups) {
      bits |= bits_of(scales, group) << (8 * int(sizeof(NUMBER)) * i % 32);
    }
  }
  return bits;
}
