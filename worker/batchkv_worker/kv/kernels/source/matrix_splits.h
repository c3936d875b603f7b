// What splits.h computes, with products of matrices of 16 by 16 and 16 by 8 numbers. A thread's
// numbers of such matrices, with `of` its quad and `place` its place there: rows `of` and `of + 8` of
// the first factor and column `of` of the second, each with numbers 2 * place, 2 * place + 1, and the
// same plus 8; of the product columns 2 * place and 2 * place + 1 of the first factor's rows.
// The order of the summed numbers is free: it follows from how records are loaded.
//
// Columns of the records are rows of first factors, query heads are columns of second ones. So a
// thread has the scores of two columns, for two query heads of each tile. Weights are transposed, as
// second factors of the values, whose numbers are rows: then it has totals of the same query heads.
// Each group has products of its own, for its scale.
//
// A simdgroup attends to 16 columns at a time, of SIMDS times 16. Their records are copied to memory
// of its own, which has room for STAGES times 16: so copies are under way at all times, and take no
// registers. Records of a row and head lie one after the other, and so do numbers of a query.
constexpr int TILES = (LINES + 7) / 8;
constexpr int THREADS = 32 * SIMDS;
constexpr int PARTS = SIMDS;
constexpr int TURN = 16 * SIMDS;
constexpr int KEY_GROUPS = KEY_SIZE / KEY_GROUP;
constexpr int KEY_RUN = KEY_GROUP / 4;
constexpr int KEY_WORDS = (KEY_RUN * KEY_BITS + 31) / 32;
constexpr int KEY_STEPS = KEY_GROUP / 16;
constexpr int KEY_TURN = turn_of(KEY_RUN, KEY_BITS, KEY_WIDE);
constexpr int KEY_SCALE_WORDS = scale_words(KEY_FORM, KEY_GROUPS);
constexpr int VALUE_GROUPS = VALUE_SIZE / VALUE_GROUP;
constexpr int VALUE_RUN = VALUE_GROUP / 8;
constexpr int VALUE_WORDS = (VALUE_RUN * VALUE_BITS + 31) / 32;
constexpr int VALUE_STEPS = VALUE_GROUP / 16;
constexpr int VALUE_TURN = turn_of(VALUE_RUN, VALUE_BITS, VALUE_WIDE);
constexpr float KEY_UNIT = IS_CODED(KEY_FORM) ? CODE_UNIT : 1.0f;
constexpr float VALUE_UNIT = IS_CODED(VALUE_FORM) ? CODE_UNIT : 1.0f;
constexpr float NO_SCORE = -1e30f;
constexpr float MOST_SCALED = 4096.0f;
constexpr float LEAST_SCALE = 1e-18f;
constexpr float MOST_SUM = 1e30f;
constexpr int VALUE_SCALE_WORDS = scale_words(VALUE_FORM, VALUE_GROUPS);
constexpr int COPY = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;  // words that are copied at once
constexpr int NUM_COPIES = 16 * WORDS / COPY;
// Of each simdgroup the records, later its outputs, at BIASES what is added to each of their groups,
// at ENDS the zeros of scores and the sums of weights.
LOCAL_ARRAY(uint32_t, pool, POOL);
#define OUTPUT(part, i) pool_floats[(part) * REGION + (i)]
LOCAL float* const pool_floats = reinterpret_cast<LOCAL float*>(pool);

const int head = GROUP_X;
const int row = GROUP_Z;
const int part = THREAD_X / 32;
const int split = GROUP_Y;
const int length = max(int(bounds[2 * row + 1] - bounds[2 * row]), 0);
const int start = bounds[2 * row] + split * SPLIT;
const int count = min(length - split * SPLIT, SPLIT);
if (count <= 0 && !JOINED && (!LAST || split > 0)) {
  return;
}
if (count > 0) {
const int lane = THREAD_X % 32;
const int of = lane / 4;
const int place = lane % 4;
const GLOBAL uint32_t* first = records + row * int64_t(records_strides[0]) +
    head * int64_t(records_strides[1]) + start * int64_t(WORDS) + lane * COPY;
KEEP(first);
LOCAL uint32_t* const region = pool + part * REGION;
// Columns after the last one are zeros, and have no weight.
#define COPY_RECORDS(base, stage)                                                               \
  if ((base) < count) {                                                                         \
    const GLOBAL uint32_t* from = first + (base) * WORDS;                                       \
    LOCAL uint32_t* to = region + (stage) * 16 * WORDS + lane * COPY;                           \
    const int num_words = min((count - (base)) * WORDS, 16 * WORDS) - lane * COPY;              \
    UNROLL for (int i = 0; i < NUM_COPIES; i += 32) {                                           \
      if (i + 32 <= NUM_COPIES || lane < NUM_COPIES - i) {                                      \
        COPY_WORDS(COPY, to + i * COPY, from + i * COPY, i * COPY < num_words);                 \
      }                                                                                         \
    }                                                                                           \
  }                                                                                             \
  END_COPIES
int base = 16 * part;
UNROLL for (int stage = 0; stage < STAGES - 1; stage++) {
  COPY_RECORDS(base + stage * TURN, stage)
}

Words<2> query[TILES][KEY_GROUPS][KEY_STEPS];
float query_sum[TILES][KEY_GROUPS][4];
Words<4> units;
UNROLL for (int i = 0; i < 4; i++) {
  units.at[i] = PAIR(0, times_of<KEY_BITS>(i / 2), times_of<KEY_BITS>(i / 2));
}
UNROLL for (int tile = 0; tile < TILES; tile++) {
  UNROLL for (int group = 0; group < KEY_GROUPS; group++) {
    UNROLL for (int i = 0; i < 4; i++) {
      query_sum[tile][group][i] = 0.0f;
    }
    const int line = 8 * tile + of;
    UNROLL for (int k = 0; k < KEY_STEPS; k++) {
      UNROLL for (int i = 0; i < 2; i++) {
        const int pair = 2 * k + i;
        uint32_t both = 0;
        if (line < LINES) {
          const GLOBAL T* own = queries + row * int64_t(queries_strides[0]) +
              (head * LINES + line) * int64_t(queries_strides[1]) + group * KEY_GROUP;
          const float unit = 1.0f / times_of<KEY_BITS>(pair);
          const float low = own[number_in_group<KEY_TURN, 4>(place, first_of<KEY_BITS>(pair))];
          const float high = own[number_in_group<KEY_TURN, 4>(place, second_of<KEY_BITS>(pair))];
          both = PAIR(KEY_BFLOAT, low * unit, high * unit);
        }
        query[tile][group][k].at[i] = both;
      }
      if (IS_CODED(KEY_FORM)) {
        multiply<0>(
            units, query[tile][group][k], query_sum[tile][group], query_sum[tile][group]);
      }
    }
    UNROLL for (int i = 0; i < 4; i++) {
      query_sum[tile][group][i] *= KEY_UNIT;
    }
  }
}
// Scores here are 1 / KEY_UNIT times the real ones, which this factor makes up for.
const float factor = AS_FLOAT(SCALE) * LOG2E * (1.0f / KEY_UNIT);

// A weight is 2 ^ (score - zero), with a zero for each query head: so that weights times scales are
// numbers of 2 bytes. It is changed when one of them is too large; or their sum, which grows unseen
// where the scales are zero.
float zero[TILES][2];
float sum[TILES][2];
float total[TILES][VALUE_GROUPS][VALUE_STEPS][4];
float bias_total[TILES][VALUE_GROUPS][2];
UNROLL for (int tile = 0; tile < TILES; tile++) {
  UNROLL for (int i = 0; i < 2; i++) {
    zero[tile][i] = LOWEST;
    sum[tile][i] = 0.0f;
  }
  UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
    UNROLL for (int i = 0; i < 4; i++) {
      bias_total[tile][group][i % 2] = 0.0f;
      UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
        total[tile][group][k][i] = 0.0f;
      }
    }
  }
}
float none[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#define COLUMN(i) (2 * place + i % 2 + i / 2 * 8)
for (int stage = 0; base < count; base += TURN) {
  WAIT_FOR_COPIES(STAGES - 2);
  SIMD_BARRIER;
  const int free_stage = stage == 0 ? STAGES - 1 : stage - 1;
  COPY_RECORDS(base + (STAGES - 1) * TURN, free_stage)
  const LOCAL uint32_t* own = region + stage * 16 * WORDS;
  stage = stage == STAGES - 1 ? 0 : stage + 1;
  float score[TILES][4];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int i = 0; i < 4; i++) {
      score[tile][i] = 0.0f;
    }
  }
  Words<KEY_SCALE_WORDS> key_scales[2];
  Words<VALUE_SCALE_WORDS> value_scales[2];
  UNROLL for (int half = 0; half < 2; half++) {
    const LOCAL uint32_t* record = own + (8 * half + of) * WORDS;
    key_scales[half] =
        load_scales<KEY_FORM, KEY_SCALE_WORDS, KEY_SCALE_WIDE>(record + KEY_SCALES);
    value_scales[half] =
        load_scales<VALUE_FORM, VALUE_SCALE_WORDS, VALUE_SCALE_WIDE>(record + VALUE_SCALES);
  }
  UNROLL for (int group = 0; group < KEY_GROUPS; group++) {
    Words<KEY_WORDS> keys[2];
    UNROLL for (int half = 0; half < 2; half++) {
      keys[half] = load_turns<KEY_RUN, KEY_TURN, 4, KEY_BITS, KEY_WIDE>(
          own + (8 * half + of) * WORDS + place * KEY_TURN * KEY_BITS / 32 +
              group * KEY_GROUP * KEY_BITS / 32,
          place * KEY_TURN * KEY_BITS % 32);
    }
    float product[TILES][4];
    UNROLL for (int k = 0; k < KEY_STEPS; k++) {
      Words<4> pairs;
      UNROLL for (int i = 0; i < 4; i++) {
        pairs.at[i] = pair_of<KEY_BITS>(keys[i % 2], 2 * k + i / 2);
      }
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        multiply<KEY_BFLOAT>(
            pairs, query[tile][group][k], k == 0 ? none : product[tile], product[tile]);
      }
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const Scale one = scale_from<T, KEY_FORM, KEY_BITS>(key_scales[i / 2], group);
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        score[tile][i] += one.scale * product[tile][i];
        if (IS_CODED(KEY_FORM)) {
          score[tile][i] += one.bias * query_sum[tile][group][i % 2];
        }
      }
    }
  }
  if (base + 16 > count) {
    UNROLL for (int i = 0; i < 4; i++) {
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        score[tile][i] = base + of + i / 2 * 8 < count ? score[tile][i] : NO_SCORE;
      }
    }
  }
  float weight[TILES][4];
  float scaled[TILES][VALUE_GROUPS][4];
  float new_sum[TILES][2];
  bool is_large = false;
#define WEIGH                                                                        \
  UNROLL for (int i = 0; i < 4; i++) {                                               \
    UNROLL for (int tile = 0; tile < TILES; tile++) {                                \
      weight[tile][i] = EXP2(factor * score[tile][i] - zero[tile][i % 2]);           \
      new_sum[tile][i % 2] = (i < 2 ? sum : new_sum)[tile][i % 2] + weight[tile][i]; \
      is_large = is_large | (i >= 2 && !(new_sum[tile][i % 2] <= MOST_SUM));         \
      UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {                    \
        scaled[tile][group][i] = weight[tile][i] *                                   \
            scale_from<T, VALUE_FORM, VALUE_BITS>(value_scales[i / 2], group).scale; \
        is_large = is_large | (abs(scaled[tile][group][i]) > MOST_SCALED);          \
      }                                                                              \
    }                                                                                \
  }
  WEIGH
  if (ANY(is_large)) {
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      UNROLL for (int i = 0; i < 2; i++) {
        float new_zero = zero[tile][i];
        UNROLL for (int half = 0; half < 2; half++) {
          float most = LEAST_SCALE;
          UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
            most = max(
                most, abs(scale_from<T, VALUE_FORM, VALUE_BITS>(value_scales[half], group).scale));
          }
          new_zero = max(new_zero, factor * score[tile][2 * half + i] + LOG2(most));
        }
        UNROLL for (int other = 4; other < 32; other *= 2) {
          new_zero = max(new_zero, SHUFFLE_XOR(new_zero, other));
        }
        const float less = EXP2(zero[tile][i] - new_zero);
        zero[tile][i] = new_zero;
        sum[tile][i] *= less;
        UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
          bias_total[tile][group][i] *= less;
          UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
            total[tile][group][k][i] *= less;
            total[tile][group][k][i + 2] *= less;
          }
        }
      }
    }
    WEIGH
  }
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int i = 0; i < 4; i++) {
      sum[tile][i % 2] = new_sum[tile][i % 2];
      UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
        if (IS_CODED(VALUE_FORM)) {
          bias_total[tile][group][i % 2] += weight[tile][i] *
              scale_from<T, VALUE_FORM, VALUE_BITS>(value_scales[i / 2], group).bias;
        }
      }
    }
  }
  UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
    Words<VALUE_WORDS> values[4];
    UNROLL for (int i = 0; i < 4; i++) {
      values[i] = load_turns<VALUE_RUN, VALUE_TURN, 8, VALUE_BITS, VALUE_WIDE>(
          own + COLUMN(i) * WORDS + VALUE_CODES + group * VALUE_GROUP * VALUE_BITS / 32 +
              of * VALUE_TURN * VALUE_BITS / 32,
          of * VALUE_TURN * VALUE_BITS % 32);
    }
    Words<2> weights[TILES];
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      UNROLL for (int i = 0; i < 2; i++) {
        weights[tile].at[i] = TRANSPOSED(
            PAIR(VALUE_BFLOAT, scaled[tile][group][2 * i], scaled[tile][group][2 * i + 1]));
      }
    }
    UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
      Words<4> pairs;
      UNROLL for (int i = 0; i < 4; i++) {
        pairs.at[i] = pair_across<VALUE_BITS>(
            values[i / 2 * 2], values[i / 2 * 2 + 1], 2 * k + i % 2);
      }
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        multiply<VALUE_BFLOAT>(
            pairs, weights[tile], total[tile][group][k], total[tile][group][k]);
      }
    }
  }
}
SIMD_BARRIER;
const auto added_up = [](float number) {
  UNROLL for (int other = 4; other < 32; other *= 2) {
    number += SHUFFLE_XOR(number, other);
  }
  return number;
};
UNROLL for (int tile = 0; tile < TILES; tile++) {
  UNROLL for (int i = 0; i < 2; i++) {
    const int line = 8 * tile + 2 * place + i;
    const bool is_one = of == 0 && line < LINES;
    const float all = added_up(sum[tile][i]);
    if (is_one) {
      OUTPUT(part, ENDS + 2 * line) = zero[tile][i];
      OUTPUT(part, ENDS + 2 * line + 1) = all;
    }
    UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
      UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
        UNROLL for (int half = 0; half < 2; half++) {
          const int own = 2 * k + half;
          const int number = group * VALUE_GROUP + number_in_group<VALUE_TURN, 8>(of, own);
          if (line < LINES) {
            OUTPUT(part, line * VALUE_SIZE + number) = total[tile][group][k][2 * half + i] *
                (1.0f / (VALUE_UNIT * times_across<VALUE_BITS>(own)));
          }
        }
      }
      if (IS_CODED(VALUE_FORM)) {
        const float bias = added_up(bias_total[tile][group][i]);
        if (is_one) {
          OUTPUT(part, BIASES + line * VALUE_GROUPS + group) = bias;
        }
      }
    }
  }
}
}
// The simdgroups, joined in order. Their weights are computed once a line, not for each number.
#define ZERO_OF(part) OUTPUT(part, ENDS + 2 * line)
#define OWN_START                                                        \
  float own_top = LOWEST;                                                \
  float own_sum = 0.0f;                                                  \
  float part_weight[PARTS];                                              \
  if (HAS_COLUMNS) {                                                     \
    UNROLL for (int part = 0; part < PARTS; part++) {                    \
      own_top = max(own_top, ZERO_OF(part));                             \
    }                                                                    \
    UNROLL for (int part = 0; part < PARTS; part++) {                    \
      part_weight[part] = EXP2(ZERO_OF(part) - own_top);                 \
      own_sum += part_weight[part] * OUTPUT(part, ENDS + 2 * line + 1);  \
    }                                                                    \
  }
#define OWN_TOP own_top
#define OWN_SUM own_sum
#define OWN_PART(part)                                                                        \
  (part_weight[part] *                                                                        \
   (OUTPUT(part, line * VALUE_SIZE + number) +                                                \
    (IS_CODED(VALUE_FORM) ? OUTPUT(part, BIASES + line * VALUE_GROUPS + number / VALUE_GROUP) \
                          : 0.0f)))
