// Scales of a record, word by word.

template <typename T>
FN void unpack_pair(uint32_t bits, int word, GLOBAL T* scales, GLOBAL T* biases) {
  if constexpr (sizeof(T) == 4) {
    (word % 2 ? biases : scales)[word / 2] = static_cast<T>(AS_FLOAT(bits));
  } else {
    scales[word] = FROM_BITS(T, bits);
    biases[word] = FROM_BITS(T, bits >> 16);
  }
}

// NUMBER is the dtype of a scale: of 1, 2 or 4 bytes.
template <typename NUMBER>
FN void unpack_scales(uint32_t bits, int word, int groups, int64_t token, GLOBAL NUMBER* scales) {
  constexpr int IN_WORD = 4 / sizeof(NUMBER);
  UNROLL for (int i = 0; i < IN_WORD; i++) {
    const int group = word * IN_WORD + i;
    if (group < groups) {
      if constexpr (sizeof(NUMBER) == 4) {
        scales[token * groups + group] = static_cast<NUMBER>(AS_FLOAT(bits));
      } else if constexpr (sizeof(NUMBER) == 2) {
        scales[token * groups + group] = FROM_BITS(NUMBER, bits >> (16 * i));
      } else {
        scales[token * groups + group] = static_cast<NUMBER>((bits >> (8 * i)) & 255);
      }
    }
  }
}
