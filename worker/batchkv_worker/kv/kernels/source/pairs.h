// Pairs of numbers as factors of a product of matrices: two halves in a word. A half whose upper six
// bits are 0 is its low ten bits times CODE_UNIT. So a code is a factor as it is; floats are themselves.
#define IS_CODED(form) (form != FLOAT_FORM)
#define CODE_UNIT 5.9604644775390625e-08f  // 2 ^ -24

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

// Pairs of codes of 4 bits are 16 times too large where they begin at bit 4 of a half.
FN uint32_t nibbles_of(uint32_t word, int pair) {
  const uint32_t moved = pair % 4 < 2 ? word : word >> 8;
  return moved & (pair % 2 ? 0x00F000F0u : 0x000F000Fu);
}

template <int BITS>
FN float times_of(int pair) {
  return BITS == 4 && pair % 2 ? 16.0f : 1.0f;
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
    return PERMUTE(run.at[pair / 2], 0u, pair % 2 ? 0x4342 : 0x4140);
  } else if constexpr (BITS == 4) {
    return nibbles_of(run.at[pair / 4], pair);
  } else {
    return code_at<BITS>(run, 2 * pair) | (code_at<BITS>(run, 2 * pair + 1) << 16);
  }
}

// Number i of the runs of two columns.
template <int BITS>
FN float times_across(int i) {
  return times_of<BITS>(i);
}

template <int BITS, int NUM>
FN uint32_t pair_across(Words<NUM> one, Words<NUM> other, int i) {
  if constexpr (BITS == 16) {
    return PERMUTE(one.at[i / 2], other.at[i / 2], i % 2 ? 0x7632 : 0x5410);
  } else if constexpr (BITS == 8) {
    const uint32_t both = PERMUTE(one.at[i / 4], other.at[i / 4], i % 4 < 2 ? 0x5140 : 0x7362);
    return PERMUTE(both, 0u, i % 2 ? 0x4342 : 0x4140);
  } else if constexpr (BITS == 4) {
    const uint32_t both = PERMUTE(one.at[i / 8], other.at[i / 8], i % 8 < 4 ? 0x5410 : 0x7632);
    return nibbles_of(both, i);
  } else {
    return code_at<BITS>(one, i) | (code_at<BITS>(other, i) << 16);
  }
}

// Threads that share a group take its numbers in turns of as many as one load brings, so that what
// they load at once lies side by side; in one turn where a load does not end with a number.
FN constexpr int turn_of(int run, int bits, int wide) {
  return run * bits % (32 * wide) == 0 && 32 * wide % bits == 0 ? 32 * wide / bits : run;
}

// Where number i of a thread's run is in the group.
template <int TURN, int LANES>
FN int number_in_group(int lane, int i) {
  return (i / TURN * LANES + lane) * TURN + i % TURN;
}

// A thread's run, of one turn after the other.
template <int RUN, int TURN, int LANES, int BITS, int WIDE>
FN Words<(RUN * BITS + 31) / 32> load_turns(const LOCAL uint32_t* from, int shift) {
  constexpr int EACH = (TURN * BITS + 31) / 32;
  Words<(RUN * BITS + 31) / 32> run;
  UNROLL for (int turn = 0; turn < RUN / TURN; turn++) {
    const Words<EACH> part =
        load_run<TURN, BITS, WIDE, 1>(from + turn * LANES * TURN * BITS / 32, shift);
    UNROLL for (int i = 0; i < EACH; i++) {
      run.at[turn * EACH + i] = part.at[i];
    }
  }
  return run;
}

// Words of a tensor's scales, for numbers of 2 bytes; floats have none, and an unused word here.
FN constexpr int scale_words(int form, int groups) {
  return form == AFFINE_FORM ? groups : form == TURBO_FORM ? (groups + 1) / 2 : 1;
}

template <int FORM, int COUNT, int WIDE>
FN Words<COUNT> load_scales(const LOCAL uint32_t* from) {
  if constexpr (FORM == FLOAT_FORM) {
    return {};
  } else {
    return load_run<COUNT, 32, WIDE, 1>(from, 0);
  }
}

template <typename T, int FORM, int BITS, int COUNT>
FN Scale scale_from(Words<COUNT> scales, int group) {
  return scale_in<T, FORM, BITS>(scales.at[FORM == TURBO_FORM ? group / 2 : group % COUNT], group);
}
