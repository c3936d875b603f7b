// What splits.h computes, with products of matrices of 16 by 16 and 16 by 8 numbers. A thread's
// numbers of such matrices, with `of` its quad and `place` its place there: of the first factor rows
// of and of + 8, of the second column `of`, each with numbers 2 * place, 2 * place + 1, and the same
// plus 8; of the product columns 2 * place and 2 * place + 1 of the first factor's rows.
// The order of the summed numbers is free: it follows from how records are loaded.
//
// Keys are rows of first factors, query heads columns of second ones. Then numbers of values are
// rows, and weights of query heads are columns. Each group has products of its own, for its scale.
constexpr int TILES = (LINES + 7) / 8;
constexpr int THREADS = 32 * SIMDS;
constexpr int KEY_GROUPS = KEY_SIZE / KEY_GROUP;
constexpr int KEY_RUN = KEY_GROUP / 4;
constexpr int KEY_WORDS = (KEY_RUN * KEY_BITS + 31) / 32;
constexpr int KEY_STEPS = KEY_GROUP / 16;
constexpr int VALUE_GROUPS = VALUE_SIZE / VALUE_GROUP;
constexpr int VALUE_RUN = VALUE_GROUP / 8;
constexpr int VALUE_WORDS = (VALUE_RUN * VALUE_BITS + 31) / 32;
constexpr int VALUE_STEPS = VALUE_GROUP / 16;
constexpr int PARTS = SIMDS;
constexpr int TURN = 16 * SIMDS;
// Scores and weights, then outputs and what is added to each of their groups; at ENDS the highest
// scores and the sums of weights.
LOCAL_ARRAY(float, pool, POOL);

const int head = GROUP_X;
const int split = GROUP_Y;
const int row = GROUP_Z;
const int start = bounds[2 * row] + split * SPLIT;
const int count = min(int(bounds[2 * row + 1]) - start, SPLIT);
#if !JOINED
if (count <= 0) {
  return;
}
#endif
if (count > 0) {
const int part = THREAD_X / 32;
const int lane = THREAD_X % 32;
const int of = lane / 4;
const int place = lane % 4;
const uint32_t step = uint32_t(records_strides[2]);
const uint32_t last = (count - 1) * step;
const GLOBAL uint32_t* first = records + row * int64_t(records_strides[0]) +
    head * int64_t(records_strides[1]) + start * int64_t(records_strides[2]);
{
  Words<2> query[TILES][KEY_GROUPS][KEY_STEPS];
  float query_sum[TILES][KEY_GROUPS][4];
  const int each = int(queries_strides[3]);
  Words<4> ones;
  UNROLL for (int i = 0; i < 4; i++) {
    ones.at[i] = PAIR(KEY_BFLOAT, 1.0f, 1.0f);
  }
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    const int line = 8 * tile + of;
    const GLOBAL T* own = queries + row * int64_t(queries_strides[0]) +
        (head * LINES + (line < LINES ? line : 0)) * int64_t(queries_strides[1]);
    UNROLL for (int group = 0; group < KEY_GROUPS; group++) {
      UNROLL for (int i = 0; i < 4; i++) {
        query_sum[tile][group][i] = 0.0f;
      }
      UNROLL for (int k = 0; k < KEY_STEPS; k++) {
        UNROLL for (int i = 0; i < 2; i++) {
          const int begin = group * KEY_GROUP + place * KEY_RUN;
          const int one = begin + first_of<KEY_BITS>(2 * k + i);
          const int other = begin + second_of<KEY_BITS>(2 * k + i);
          const float low = float(own[one * each]);
          const float high = float(own[other * each]);
          query[tile][group][k].at[i] = line < LINES ? PAIR(KEY_BFLOAT, low, high) : 0;
        }
        multiply<KEY_BFLOAT>(ones, query[tile][group][k], query_sum[tile][group]);
      }
    }
  }
  const float factor = scale[0] * LOG2E;
  const uint32_t own = of * step;
  const GLOBAL uint32_t* codes = first + place * KEY_RUN * KEY_BITS / 32;
  const int shift = place * KEY_RUN * KEY_BITS % 32;
  const GLOBAL uint32_t* groups = first + KEY_SCALES;
  KEEP(codes);
  KEEP(groups);
  for (int base = 16 * part; base < count; base += TURN) {
    Words<KEY_WORDS> runs[2][KEY_GROUPS];
    Scale scales[2][KEY_GROUPS];
    UNROLL for (int i = 0; i < 2; i++) {
      // Columns after the last one are read as the last one, and not used.
      const uint32_t at = min((base + 8 * i) * step + own, last);
      UNROLL for (int group = 0; group < KEY_GROUPS; group++) {
        runs[i][group] = load_run<KEY_RUN, KEY_BITS, KEY_WIDE>(
            codes + at + group * KEY_GROUP * KEY_BITS / 32, shift);
        scales[i][group] = scale_of<T, KEY_FORM, KEY_BITS>(groups, at, group);
      }
    }
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      UNROLL for (int group = 0; group < KEY_GROUPS; group++) {
        float product[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        UNROLL for (int k = 0; k < KEY_STEPS; k++) {
          Words<4> keys;
          UNROLL for (int i = 0; i < 4; i++) {
            keys.at[i] = pair_of<KEY_BITS>(runs[i % 2][group], 2 * k + i / 2);
          }
          multiply<KEY_BFLOAT>(keys, query[tile][group][k], product);
        }
        UNROLL for (int i = 0; i < 4; i++) {
          const Scale one = scales[i / 2][group];
          score[i] += one.scale * product[i];
          if (IS_CODED(KEY_FORM)) {
            score[i] += (one.bias - CODED_OFFSET * one.scale) * query_sum[tile][group][i % 2];
          }
        }
      }
      UNROLL for (int i = 0; i < 4; i++) {
        const int line = 8 * tile + 2 * place + i % 2;
        if (line < LINES) {
          pool[(base + 8 * (i / 2) + of) * LINES + line] = factor * score[i];
        }
      }
    }
  }
}
BARRIER;
const int rounded = (count + TURN - 1) / TURN * TURN;
for (int line = part; line < LINES; line += SIMDS) {
  float top = LOWEST;
  for (int column = lane; column < count; column += 32) {
    top = max(top, pool[column * LINES + line]);
  }
  UNROLL for (int other = 1; other < 32; other *= 2) {
    top = max(top, SHUFFLE_XOR(top, other));
  }
  float sum = 0.0f;
  for (int column = lane; column < rounded; column += 32) {
    const float weight = column < count ? EXP2(pool[column * LINES + line] - top) : 0.0f;
    pool[column * LINES + line] = weight;
    sum += weight;
  }
  UNROLL for (int other = 1; other < 32; other *= 2) {
    sum += SHUFFLE_XOR(sum, other);
  }
  if (lane == 0) {
    pool[ENDS + 2 * line] = top;
    pool[ENDS + 2 * line + 1] = sum;
  }
}
BARRIER;
{
  const GLOBAL uint32_t* codes = first + VALUE_CODES + of * VALUE_RUN * VALUE_BITS / 32;
  const int shift = of * VALUE_RUN * VALUE_BITS % 32;
  const GLOBAL uint32_t* groups = first + VALUE_SCALES;
  KEEP(codes);
  KEEP(groups);
  // Weights times scales would be too small for halves: powers of two make the largest scale 1.
  float up[VALUE_GROUPS];
  float down[VALUE_GROUPS];
  UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
    up[group] = 1.0f;
    down[group] = 1.0f;
    if (IS_CODED(VALUE_FORM)) {
      float top = 0.0f;
      for (int column = lane; column < count; column += 32) {
        top = max(top, abs(scale_of<T, VALUE_FORM, VALUE_BITS>(groups, column * step, group).scale));
      }
      UNROLL for (int other = 1; other < 32; other *= 2) {
        top = max(top, SHUFFLE_XOR(top, other));
      }
      const uint32_t power = min(max(AS_UINT(top) >> 23, 1u), 253u);
      up[group] = AS_FLOAT((254 - power) << 23);
      down[group] = AS_FLOAT(power << 23);
    }
  }
  float total[TILES][VALUE_GROUPS][VALUE_STEPS][4];
  float bias_total[TILES][VALUE_GROUPS];
  float weight_total[TILES][VALUE_GROUPS];
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
      bias_total[tile][group] = 0.0f;
      weight_total[tile][group] = 0.0f;
      UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
        UNROLL for (int i = 0; i < 4; i++) {
          total[tile][group][k][i] = 0.0f;
        }
      }
    }
  }
  for (int base = 16 * part; base < count; base += TURN) {
    Words<VALUE_WORDS> runs[4][VALUE_GROUPS];
    Scale scales[4][VALUE_GROUPS];
    UNROLL for (int i = 0; i < 4; i++) {
      const uint32_t at = min((base + 4 * place + i) * step, last);
      UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
        runs[i][group] = load_run<VALUE_RUN, VALUE_BITS, VALUE_WIDE>(
            codes + at + group * VALUE_GROUP * VALUE_BITS / 32, shift);
        scales[i][group] = scale_of<T, VALUE_FORM, VALUE_BITS>(groups, at, group);
      }
    }
    UNROLL for (int tile = 0; tile < TILES; tile++) {
      const int line = 8 * tile + of;
      float weight[4];
      UNROLL for (int i = 0; i < 4; i++) {
        weight[i] = line < LINES ? pool[(base + 4 * place + i) * LINES + line] : 0.0f;
      }
      UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
        Words<2> weights;
        UNROLL for (int i = 0; i < 2; i++) {
          const float low = weight[2 * i] * scales[2 * i][group].scale * up[group];
          const float high = weight[2 * i + 1] * scales[2 * i + 1][group].scale * up[group];
          weights.at[i] = PAIR(VALUE_BFLOAT, low, high);
          if (IS_CODED(VALUE_FORM)) {
            bias_total[tile][group] += weight[2 * i] * scales[2 * i][group].bias +
                weight[2 * i + 1] * scales[2 * i + 1][group].bias;
            weight_total[tile][group] += PAIR_SUM(weights.at[i]);
          }
        }
        UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
          Words<4> values;
          UNROLL for (int i = 0; i < 4; i++) {
            values.at[i] = pair_across<VALUE_BITS>(
                runs[i / 2 * 2][group], runs[i / 2 * 2 + 1][group], 2 * k + i % 2);
          }
          multiply<VALUE_BFLOAT>(values, weights, total[tile][group][k]);
        }
      }
    }
  }
  BARRIER;
  UNROLL for (int tile = 0; tile < TILES; tile++) {
    UNROLL for (int group = 0; group < VALUE_GROUPS; group++) {
      UNROLL for (int k = 0; k < VALUE_STEPS; k++) {
        UNROLL for (int i = 0; i < 4; i++) {
          const int line = 8 * tile + 2 * place + i % 2;
          const int number = group * VALUE_GROUP + of * VALUE_RUN + 2 * k + i / 2;
          if (line < LINES) {
            pool[(part * LINES + line) * VALUE_SIZE + number] =
                down[group] * total[tile][group][k][i];
          }
        }
      }
      if (IS_CODED(VALUE_FORM)) {
        float added = bias_total[tile][group] -
            CODED_OFFSET * down[group] * weight_total[tile][group];
        added += SHUFFLE_XOR(added, 1);
        added += SHUFFLE_XOR(added, 2);
        if (place == 0 && 8 * tile + of < LINES) {
          pool[SIMDS * LINES * VALUE_SIZE + (part * LINES + 8 * tile + of) * VALUE_GROUPS + group] =
              added;
        }
      }
    }
  }
}
}
#define ADDED_AT(i, part)                                                \
  (SIMDS * LINES * VALUE_SIZE + ((part) * LINES + (i) / VALUE_SIZE) * VALUE_GROUPS + \
   (i) % VALUE_SIZE / VALUE_GROUP)
#define OWN_NUMBER(i, part)                 \
  (pool[(part) * LINES * VALUE_SIZE + (i)] + \
   (IS_CODED(VALUE_FORM) ? pool[ADDED_AT(i, part)] : 0.0f))
