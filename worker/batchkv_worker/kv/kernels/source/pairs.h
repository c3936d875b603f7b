// Pairs of numbers as factors of a product of matrices: two halves in a word. Codes are 1024 more
// than they are, which is what the bits 0x6400 of a half mean; floats are themselves.
#define IS_CODED(form) (form != FLOAT_FORM)
#define CODED_OFFSET 1024.0f

template <int BITS, int NUM>
FN uint32_t code_at(Words<NUM> run, int i) {
  const int word = i * BITS / 32;
  const int shift = i * BITS % 32;
  uint32_t code = run.at[word] >> shift;
  if (shift + BITS > 32) {
    code |= run.at[word + 1 < NUM ? word + 1 : word] << (32 - shift);
  }
  return code & ((1u << BITS) - 1);
}

// Which numbers of a run a pair has.
template <int BITS>
FN int first_of(int pair) {
  return BITS == 4 ? pair / 4 * 8 + pair % 4 : 2 * pair;
}

template <int BITS>
FN int second_of(int pair) {
  return first_of<BITS>(pair) + (BITS == 4 ? 4 : 1);
}

template <int BITS, int NUM>
FN uint32_t pair_of(Words<NUM> run, int pair) {
  if constexpr (BITS == 16) {
    return run.at[pair];
  } else if constexpr (BITS == 8) {
    return PERMUTE(run.at[pair / 2], 0x64646464u, pair % 2 ? 0x4342 : 0x4140);
  } else if constexpr (BITS == 4) {
    return NIBBLES(run.at[pair / 4] >> (4 * (pair % 4)));
  } else {
    return code_at<BITS>(run, 2 * pair) | (code_at<BITS>(run, 2 * pair + 1) << 16) | 0x64006400u;
  }
}

// Number i of the runs of two columns.
template <int BITS, int NUM>
FN uint32_t pair_across(Words<NUM> one, Words<NUM> other, int i) {
  if constexpr (BITS == 16) {
    return PERMUTE(one.at[i / 2], other.at[i / 2], i % 2 ? 0x7632 : 0x5410);
  } else if constexpr (BITS == 8) {
    const uint32_t both = PERMUTE(one.at[i / 4], other.at[i / 4], i % 4 < 2 ? 0x5140 : 0x7362);
    return PERMUTE(both, 0x64646464u, i % 2 ? 0x4342 : 0x4140);
  } else if constexpr (BITS == 4) {
    const uint32_t both = PERMUTE(one.at[i / 8], other.at[i / 8], i % 8 < 4 ? 0x5410 : 0x7632);
    return NIBBLES(both >> (4 * (i % 4)));
  } else {
    return code_at<BITS>(one, i) | (code_at<BITS>(other, i) << 16) | 0x64006400u;
  }
}
