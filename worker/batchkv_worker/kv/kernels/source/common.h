// What all bodies share. A dialect defines FN, FN_APART, GLOBAL, LOCAL, LOCAL_ARRAY, UNROLL, UNROLL_4,
// BARRIER, SHUFFLE_XOR, READ, READ_AS, KEEP, MASKED, EXP2, LOG2, ROOT, SINE_COSINE, AS_FLOAT, AS_UINT,
// FROM_BITS, TO_BITS, LOWER, UPPER, GIVEN_BACK, READS_WIDE, IS_ALIGNED and ADD_ONE before this. One
// with products of matrices also defines ANY, SIMD_BARRIER, COPY_WORDS, END_COPIES, WAIT_FOR_COPIES,
// PERMUTE, PAIR, TRANSPOSED and multiply(). One whose threadgroups may wait for no other, but see
// what others wrote, also defines IS_LAST, ALL_SEE and SEEN.

// Forms of a tensor, as layout.Form has them.
#define FLOAT_FORM 0
#define AFFINE_FORM 1
#define TURBO_FORM 2
#define MX_FORM 3
#define NV_FORM 4
#define LOG2E 1.44269504088896340736f
#define LOWEST -3.0e38f

template <int COUNT>
struct Words {
  uint32_t at[COUNT];
};

struct Scale {
  float scale, bias;
};

// COUNT numbers of BITS bits each, which begin at bit `shift` of a word, moved to bit 0. WIDE words
// are loaded at once where all runs begin at words. Memory of a threadgroup, if IS_LOCAL.
template <int COUNT, int BITS, int WIDE, int IS_LOCAL = 0>
FN Words<(COUNT * BITS + 31) / 32> load_run(const GLOBAL uint32_t* from, int shift) {
  constexpr int NUM = (COUNT * BITS + 31) / 32;
  Words<NUM> run;
  if constexpr (COUNT * BITS % 32 == 0 && WIDE == 4) {
    UNROLL for (int i = 0; i < NUM; i += 4) {
      const uint4 four = READ_AS(IS_LOCAL, uint4, from + i);
      run.at[i] = four.x;
      run.at[i + 1] = four.y;
      run.at[i + 2] = four.z;
      run.at[i + 3] = four.w;
    }
  } else if constexpr (COUNT * BITS % 32 == 0 && WIDE == 2) {
    UNROLL for (int i = 0; i < NUM; i += 2) {
      const uint2 two = READ_AS(IS_LOCAL, uint2, from + i);
      run.at[i] = two.x;
      run.at[i + 1] = two.y;
    }
  } else if constexpr (COUNT * BITS % 32 == 0) {
    UNROLL for (int i = 0; i < NUM; i++) {
      run.at[i] = READ_AS(IS_LOCAL, uint32_t, from + i);
    }
  } else {
    uint32_t low = READ_AS(IS_LOCAL, uint32_t, from);
    UNROLL for (int i = 0; i < NUM; i++) {
      const uint32_t high = shift + COUNT * BITS > 32 * (i + 1) ? READ_AS(IS_LOCAL, uint32_t, from + i + 1) : 0;
      run.at[i] = (low >> shift) | ((high << 1) << (31 - shift));
      low = high;
    }
  }
  return run;
}

// A float of 8 bits, 4 of them exponent, as mx.from_fp8 reads it. It has no infinity.
FN float from_e4m3(uint32_t code) {
  const uint32_t low = code & 127;
  const float normal = AS_FLOAT((low << 20) + (120u << 23));
  const float size = low < 8 ? float(low) * 0.001953125f : normal;
  return code & 128 ? -size : size;
}

// A float of 4 bits: twice its size is a nibble of the constant.
FN float from_e2m1(uint32_t code) {
  const float size = float((0xC8643210u >> (4 * (code & 7))) & 15) * 0.5f;
  return code & 8 ? -size : size;
}

// Codes are not shifted to bit 0, because shifts and conversions of integers are slow: a code at bit
// `place_of` is read 2 ^ place_of times too large, and `unit_of` is what that is divided by. Codes
// that begin in the upper half of a word are 16 bits lower then. One in two words is put together.
template <int FORM, int BITS>
FN int place_of(int i) {
  const int shift = i * BITS % 32;
  const bool is_plain = FORM != AFFINE_FORM && FORM != TURBO_FORM;
  return is_plain || shift + BITS > 32 ? 0 : shift % 16;
}

template <int FORM, int BITS>
FN float unit_of(int i) {
  return 1.0f / (1 << place_of<FORM, BITS>(i));
}

// Number i of a run, before its scale, times 1 / unit_of. For constant i most of this is constant.
template <typename T, int FORM, int BITS, int NUM>
FN float number_of(Words<NUM> run, int i) {
  const int word = i * BITS / 32;
  const int shift = i * BITS % 32;
  if constexpr (BITS == 32) {
    return AS_FLOAT(run.at[word]);
  } else if constexpr (FORM == FLOAT_FORM) {
    return float(FROM_BITS(T, run.at[word] >> shift));
  } else if constexpr (FORM == AFFINE_FORM || FORM == TURBO_FORM) {
    uint32_t code = run.at[word];
    if (shift + BITS > 32) {
      code = (code >> shift) | (run.at[word + 1 < NUM ? word + 1 : word] << (32 - shift));
    } else if (shift >= 16) {
      code >>= 16;
    }
    // The last bit of 2^23 as a float is 1, so the code's bits are its value there.
    const uint32_t mask = ((1u << BITS) - 1) << place_of<FORM, BITS>(i);
    return AS_FLOAT(MASKED(code, mask)) - 8388608.0f;
  } else if constexpr (BITS == 8) {
    return from_e4m3(run.at[word] >> shift);
  } else {
    return from_e2m1(run.at[word] >> shift);
  }
}

// A number is its group's scale times what number_of gives, plus the bias. For T of 2 bytes, a word
// has the scale and the bias of a group, or turbo's scales of two groups.
template <typename T, int FORM, int BITS>
FN Scale scale_in(uint32_t word, uint32_t group) {
  Scale found = {1.0f, 0.0f};
  if constexpr (FORM == AFFINE_FORM) {
    found.scale = LOWER(T, word);
    found.bias = UPPER(T, word);
  } else if constexpr (FORM == TURBO_FORM) {
    found.scale = group % 2 ? UPPER(T, word) : LOWER(T, word);
    found.bias = found.scale * (-0.5f * ((1 << BITS) - 1));
  }
  return found;
}

// The scale of a group of any form. The scales of a record begin at word `at`.
template <typename T, int FORM, int BITS>
FN Scale scale_of(const GLOBAL uint32_t* scales, uint32_t at, uint32_t group) {
  Scale found = {1.0f, 0.0f};
  if constexpr (FORM == AFFINE_FORM && sizeof(T) == 4) {
    found.scale = AS_FLOAT(READ(uint32_t, scales + at + 2 * group));
    found.bias = AS_FLOAT(READ(uint32_t, scales + at + 2 * group + 1));
  } else if constexpr (FORM == AFFINE_FORM) {
    found = scale_in<T, FORM, BITS>(READ(uint32_t, scales + at + group), group);
  } else if constexpr (FORM == TURBO_FORM && sizeof(T) == 4) {
    found.scale = AS_FLOAT(READ(uint32_t, scales + at + group));
    found.bias = found.scale * (-0.5f * ((1 << BITS) - 1));
  } else if constexpr (FORM == TURBO_FORM) {
    found = scale_in<T, FORM, BITS>(READ(uint32_t, scales + at + group / 2), group);
  } else if constexpr (FORM == MX_FORM) {
    const uint32_t power = (READ(uint32_t, scales + at + group / 4) >> (8 * (group % 4))) & 255;
    found.scale = AS_FLOAT(power == 0 ? 0x400000u : power << 23);
  } else if constexpr (FORM == NV_FORM) {
    found.scale = from_e4m3((READ(uint32_t, scales + at + group / 4) >> (8 * (group % 4))) & 255);
  }
  return found;
}
