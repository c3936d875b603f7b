// Eight numbers of a vector become codes, by the rules of mx.quantize and of Turbo.pack. MLX's rules
// on GPUs differ at ties, zeros and one sign: a dialect defines AS_ON_GPU, 0 or 1.
#if AS_ON_GPU
#define ROUND(number) round(number)
#define HIGHEST_START 0.0f
#else
#define ROUND(number) rintf(number)
#define HIGHEST_START (10.0f * LOWEST)  // none
#endif

// What eight numbers were packed to. `scale` and `bias` are those of affine codes.
template <typename T>
struct Packed {
  Words<8> codes;
  T scale, bias;
};

FN uint32_t to_e4m3(float number) {
  const uint32_t bits = AS_UINT(number);
  const uint32_t sign = (bits >> 24) & 128;
  const float size = AS_FLOAT(bits & 0x7FFFFFFF);
  if (size >= 448.0f) {
    return sign | 126;
  }
  if (size < 0.015625f) {
    return sign | (AS_UINT(size + 16384.0f) - AS_UINT(16384.0f));
  }
  const uint32_t kept = AS_UINT(size) - (120u << 23);
  return sign | ((kept + 0x7FFFF + ((kept >> 20) & 1)) >> 20);
}

// The nearest float of 4 bits. Of two as near, on a GPU the even one, else the smaller one.
FN uint32_t to_e2m1(float number) {
  const float size = abs(number);
  const uint32_t odd = uint32_t(size > 0.25f) + uint32_t(size > 1.25f) + uint32_t(size > 2.5f) +
      uint32_t(size > 5.0f);
#if AS_ON_GPU
  const uint32_t even = uint32_t(size >= 0.75f) + uint32_t(size >= 1.75f) + uint32_t(size >= 3.5f);
  return odd + even + ((AS_UINT(number) >> 28) & 8);
#else
  const uint32_t even = uint32_t(size > 0.75f) + uint32_t(size > 1.75f) + uint32_t(size > 3.5f);
  return odd + even != 0 && number < 0.0f ? odd + even + 8 : odd + even;
#endif
}

// The smallest power of two that is not below a number, as its exponent.
FN uint32_t to_e8m0(float number) {
#if AS_ON_GPU
  const uint32_t bits = AS_UINT(number);
  return min((bits >> 23) + uint32_t((bits & 0x7FFFFF) != 0), 254u);
#else
  return number > 0.0f ? uint32_t(int(ceil(LOG2(number))) + 127) : 127;
#endif
}

template <int BITS>
FN void write_codes(Words<8> codes, GLOBAL uint8_t* to) {
  if constexpr (BITS == 4 || BITS == 8) {
    constexpr int IN_WORD = 32 / BITS;
    UNROLL for (int word = 0; word < BITS / 4; word++) {
      uint32_t held = 0;
      UNROLL for (int i = 0; i < IN_WORD; i++) {
        held |= codes.at[word * IN_WORD + i] << (i * BITS);
      }
      ((GLOBAL uint32_t*)to)[word] = held;
    }
  } else {
    uint32_t held = 0;
    UNROLL for (int i = 0, bits = 0; i < 8; i++) {
      held |= codes.at[i] << (bits % 8);
      const int done = (bits + BITS) / 8 - bits / 8;
      if (done) {
        to[bits / 8] = uint8_t(held);
        held >>= 8;
      }
      bits += BITS;
    }
  }
}

// Numbers 8 * unit and so on of one vector. GROUP / 8 neighbouring threads share a group, so all
// threads of a simdgroup must come here. `step` is the distance of turbo's levels at magnitude 1. The
// scales of groups are written at every EACH-th place, and so are the biases of affine codes.
template <typename T, int FORM, int BITS, int GROUP, int EACH>
FN Packed<T> pack_eight(
    Eight given, int unit, bool is_used, float step, GLOBAL uint8_t* codes, GLOBAL uint8_t* scales,
    GLOBAL T* biases) {
  Packed<T> packed;
  if constexpr (FORM == FLOAT_FORM) {
    if (is_used) {
      UNROLL for (int i = 0; i < 8; i++) {
        ((GLOBAL T*)codes)[8 * unit + i] = static_cast<T>(given.at[i]);
      }
    }
  } else {
    float low = given.at[0];
    float high = given.at[0];
    UNROLL for (int i = 1; i < 8; i++) {
      low = min(low, given.at[i]);
      high = max(high, given.at[i]);
    }
    UNROLL for (int other = 1; other < GROUP / 8; other *= 2) {
      low = min(low, SHUFFLE_XOR(low, other));
      high = max(high, SHUFFLE_XOR(high, other));
    }
    constexpr float HIGHEST = (1 << BITS) - 1;
    const bool is_first = is_used && unit % (GROUP / 8) == 0;
    const int group = unit / (GROUP / 8);
    if constexpr (FORM == AFFINE_FORM) {
      high = max(high, HIGHEST_START);
      const bool is_low = abs(low) > abs(high);
      float scale = max((high - low) / HIGHEST, 1e-7f);
      scale = is_low ? scale : -scale;
      const float edge = is_low ? low : high;
      const float steps = ROUND(edge / scale);
      scale = steps == 0.0f ? scale : edge / steps;
      const float bias = steps == 0.0f ? 0.0f : edge;
      UNROLL for (int i = 0; i < 8; i++) {
        const float code = ROUND((given.at[i] - bias) / scale);
        packed.codes.at[i] = uint32_t(min(max(code, 0.0f), HIGHEST));
      }
      packed.scale = static_cast<T>(scale);
      packed.bias = static_cast<T>(bias);
      if (is_first) {
        ((GLOBAL T*)scales)[EACH * group] = packed.scale;
        biases[EACH * group] = packed.bias;
      }
    } else if constexpr (FORM == TURBO_FORM) {
      const T scale = static_cast<T>(max(abs(low), abs(high)) * step);
      const float divisor = max(float(scale), 1e-30f);
      UNROLL for (int i = 0; i < 8; i++) {
        const float code = floor(given.at[i] / divisor + (HIGHEST + 1.0f) / 2.0f);
        packed.codes.at[i] = uint32_t(min(max(code, 0.0f), HIGHEST));
      }
      if (is_first) {
        ((GLOBAL T*)scales)[group] = scale;
      }
    } else {
      const float top = max(abs(low), abs(high)) / (BITS == 4 ? 6.0f : 448.0f);
      uint32_t code;
      float scale;
      if constexpr (FORM == NV_FORM) {
        code = to_e4m3(top);
        scale = from_e4m3(code);
      } else {
        code = to_e8m0(top);
        scale = AS_FLOAT(code == 0 ? 0x400000u : code << 23);
      }
      UNROLL for (int i = 0; i < 8; i++) {
#if AS_ON_GPU
        const float number = given.at[i] * (scale == 0.0f ? 0.0f : 1.0f / scale);
#else
        const float number = given.at[i] / scale;
#endif
        packed.codes.at[i] = BITS == 4 ? to_e2m1(number) : to_e4m3(number);
      }
      if (is_first) {
        scales[group] = uint8_t(code);
      }
    }
    if (is_used) {
      write_codes<BITS>(packed.codes, codes + BITS * unit);
    }
  }
  return packed;
}
