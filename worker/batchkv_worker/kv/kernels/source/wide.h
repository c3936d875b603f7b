// Several numbers that lie next to each other, read and written at once. A dialect defines READS_WIDE,
// 0 or 1, and IS_ALIGNED: whether words of so many bytes may be read there. Without, numbers are read
// one by one.
struct Two {
  float low, high;
};

struct Eight {
  float at[8];
};

template <typename T>
FN uint32_t two_of(float low, float high) {
  return uint32_t(TO_BITS(T, low)) | (uint32_t(TO_BITS(T, high)) << 16);
}

// Reads two numbers of 4 or 2 bytes.
template <typename T>
FN Two read_two(const GLOBAL T* from, int64_t step) {
  Two found;
  if constexpr (sizeof(T) == 2 && READS_WIDE) {
    if (step == 1 && IS_ALIGNED(from, 4)) {
      const uint32_t word = READ(uint32_t, from);
      found.low = LOWER(T, word);
      found.high = UPPER(T, word);
      return found;
    }
  }
  found.low = float(from[0]);
  found.high = float(from[step]);
  return found;
}

// Writes two numbers. Two of 2 bytes each begin at a word.
template <typename T>
FN void write_two(Two numbers, GLOBAL T* to) {
  if constexpr (sizeof(T) == 2) {
    *(GLOBAL uint32_t*)to = two_of<T>(numbers.low, numbers.high);
  } else {
    to[0] = static_cast<T>(numbers.low);
    to[1] = static_cast<T>(numbers.high);
  }
}

template <typename T>
FN Eight read_eight(const GLOBAL T* from, int64_t step) {
  Eight found;
  if (READS_WIDE && step == 1 && IS_ALIGNED(from, 16)) {
    UNROLL for (int part = 0; part < int(sizeof(T)) / 2; part++) {
      const uint4 four = READ(uint4, (const GLOBAL uint4*)from + part);
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
      UNROLL for (int i = 0; i < 4; i++) {
        if constexpr (sizeof(T) == 4) {
          found.at[4 * part + i] = AS_FLOAT(words[i]);
        } else {
          found.at[2 * i] = LOWER(T, words[i]);
          found.at[2 * i + 1] = UPPER(T, words[i]);
        }
      }
    }
  } else {
    UNROLL for (int i = 0; i < 8; i++) {
      found.at[i] = float(from[i * step]);
    }
  }
  return found;
}

// Writes numbers 8 * unit and so on of a vector that begins at a word of 16 bytes.
template <typename T>
FN void write_eight(Eight numbers, GLOBAL T* vector, int unit) {
  GLOBAL uint4* to = (GLOBAL uint4*)(vector + 8 * unit);
  if constexpr (sizeof(T) == 4) {
    UNROLL for (int part = 0; part < 2; part++) {
      const uint4 four = {
          AS_UINT(numbers.at[4 * part]), AS_UINT(numbers.at[4 * part + 1]),
          AS_UINT(numbers.at[4 * part + 2]), AS_UINT(numbers.at[4 * part + 3])};
      to[part] = four;
    }
  } else {
    const uint4 all = {
        two_of<T>(numbers.at[0], numbers.at[1]), two_of<T>(numbers.at[2], numbers.at[3]),
        two_of<T>(numbers.at[4], numbers.at[5]), two_of<T>(numbers.at[6], numbers.at[7])};
    to[0] = all;
  }
}
