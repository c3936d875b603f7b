// Attention of one token of each row over SPLIT of its columns. Inputs: queries, records, bounds,
// and where JOINED those of join.h. finish.h has the output. Scores are logarithms to the
// base 2.
//
// A threadgroup has SIMDS simdgroups. TILES of them divide the query heads among them, PARTS of
// them the columns. In the first half KEY_LANES threads share a column, in the second VALUE_LANES.
// Each PIECE of a thread's numbers is in one group.
constexpr int PARTS = SIMDS / TILES;
constexpr int TILE = (LINES + TILES - 1) / TILES;
constexpr int ALL_LINES = TILES * TILE;  // some of the last tile's may be none
constexpr int THREADS = 32 * SIMDS;
// The threads that share a column add up their scores: one step for each power of two of them.
// While the number of lines is even, each half of the threads goes on with half of the lines. The
// numbers are constants, so that scores stay in registers.
constexpr int LEFT_2 = KEY_LANES > 1 && TILE % 2 == 0 ? TILE / 2 : TILE;
constexpr int LEFT_4 = KEY_LANES > 2 && LEFT_2 % 2 == 0 ? LEFT_2 / 2 : LEFT_2;
constexpr int LEFT_8 = KEY_LANES > 4 && LEFT_4 % 2 == 0 ? LEFT_4 / 2 : LEFT_4;
constexpr int LEFT_16 = KEY_LANES > 8 && LEFT_8 % 2 == 0 ? LEFT_8 / 2 : LEFT_8;
constexpr int LEFT = KEY_LANES > 16 && LEFT_16 % 2 == 0 ? LEFT_16 / 2 : LEFT_16;
#define ADD_UP(other, lines, left)                                      \
  if (other < KEY_LANES && left < lines) {                              \
    const bool upper = lane & other;                                    \
    UNROLL for (int line = 0; line < left; line++) {                    \
      const int above = line + left < TILE ? line + left : line;        \
      const float kept = upper ? score[above] : score[line];            \
      const float given = upper ? score[line] : score[above];           \
      score[line] = kept + SHUFFLE_XOR(given, other);                   \
    }                                                                   \
    line_of += upper ? left : 0;                                        \
  } else if (other < KEY_LANES) {                                       \
    same += other;                                                      \
    UNROLL for (int line = 0; line < lines; line++) {                   \
      score[line] += SHUFFLE_XOR(score[line], other);                   \
    }                                                                   \
  }
constexpr int KEY_EACH = KEY_SIZE / KEY_LANES;
constexpr int KEY_PIECES = KEY_EACH / KEY_PIECE;
constexpr int KEY_COLUMNS = 32 / KEY_LANES;
constexpr int KEY_WORDS = (KEY_EACH * KEY_BITS + 31) / 32;
constexpr int VALUE_EACH = VALUE_SIZE / VALUE_LANES;
constexpr int VALUE_PIECES = VALUE_EACH / VALUE_PIECE;
constexpr int VALUE_COLUMNS = 32 / VALUE_LANES;
constexpr int VALUE_WORDS = (VALUE_EACH * VALUE_BITS + 31) / 32;
constexpr bool KEY_BIAS = KEY_FORM == AFFINE_FORM || KEY_FORM == TURBO_FORM;
constexpr bool VALUE_BIAS = VALUE_FORM == AFFINE_FORM || VALUE_FORM == TURBO_FORM;
// Queries, then scores and weights, then outputs; at ENDS the highest scores and sums of weights.
LOCAL_ARRAY(float, pool, POOL);

const int head = GROUP_X;
const int split = GROUP_Y;
const int row = GROUP_Z;
const int length = max(int(bounds[2 * row + 1] - bounds[2 * row]), 0);
const int start = bounds[2 * row] + split * SPLIT;
const int count = min(length - split * SPLIT, SPLIT);
if (count <= 0 && !JOINED && (!LAST || split > 0)) {
  return;
}
if (count > 0) {
const int simd = THREAD_X / 32;
const int lane = THREAD_X % 32;
const int tile = simd % TILES;
const int part = simd / TILES;
const uint32_t step = uint32_t(records_strides[2]);
const uint32_t last = (count - 1) * step;
const GLOBAL uint32_t* first = records + row * int64_t(records_strides[0]) +
    head * int64_t(records_strides[1]) + start * int64_t(records_strides[2]);

for (int i = THREAD_X; i < LINES * KEY_SIZE; i += THREADS) {
  const int64_t line = head * LINES + i / KEY_SIZE;
  pool[i] = AS_FLOAT(SCALE) * LOG2E * float(queries[row * int64_t(queries_strides[0]) +
      line * int64_t(queries_strides[1]) + (i % KEY_SIZE) * int64_t(queries_strides[3])]);
}
BARRIER;
{
  const int place = lane % KEY_LANES;
  float query[TILE][KEY_EACH];
  float query_sum[TILE][KEY_PIECES];
  UNROLL for (int line = 0; line < TILE; line++) {
    UNROLL for (int piece = 0; piece < KEY_PIECES; piece++) {
      query_sum[line][piece] = 0.0f;
    }
    UNROLL for (int i = 0; i < KEY_EACH; i++) {
      const int of = tile * TILE + line;
      const float number = of < LINES ? pool[of * KEY_SIZE + place * KEY_EACH + i] : 0.0f;
      query[line][i] = number * unit_of<KEY_FORM, KEY_BITS>(i);
      query_sum[line][i / KEY_PIECE] += number;
    }
  }
  BARRIER;
  const uint32_t own = lane / KEY_LANES * step;
  const GLOBAL uint32_t* codes = first + place * KEY_EACH * KEY_BITS / 32;
  const int shift = place * KEY_EACH * KEY_BITS % 32;
  const GLOBAL uint32_t* groups = first + KEY_SCALES;
  KEEP(codes);
  KEEP(groups);
  for (int base = part * KEY_COLUMNS * AHEAD; base < count;
       base += PARTS * KEY_COLUMNS * AHEAD) {
    Words<KEY_WORDS> runs[AHEAD];
    Scale scales[AHEAD][KEY_PIECES];
    UNROLL for (int a = 0; a < AHEAD; a++) {
      // Columns after the last one are read as the last one, and not used.
      const uint32_t at = min((base + a * KEY_COLUMNS) * step + own, last);
      runs[a] = load_run<KEY_EACH, KEY_BITS, KEY_WIDE>(codes + at, shift);
      UNROLL for (int piece = 0; piece < KEY_PIECES; piece++) {
        scales[a][piece] = scale_of<T, KEY_FORM, KEY_BITS>(
            groups, at, (place * KEY_EACH + piece * KEY_PIECE) / KEY_GROUP);
      }
    }
    UNROLL for (int a = 0; a < AHEAD; a++) {
      float score[TILE];
      UNROLL for (int line = 0; line < TILE; line++) {
        score[line] = 0.0f;
      }
      UNROLL for (int piece = 0; piece < KEY_PIECES; piece++) {
        float product[TILE];
        UNROLL for (int line = 0; line < TILE; line++) {
          product[line] = 0.0f;
        }
        UNROLL for (int i = piece * KEY_PIECE; i < (piece + 1) * KEY_PIECE; i++) {
          const float number = number_of<T, KEY_FORM, KEY_BITS>(runs[a], i);
          UNROLL for (int line = 0; line < TILE; line++) {
            product[line] += query[line][i] * number;
          }
        }
        UNROLL for (int line = 0; line < TILE; line++) {
          score[line] += scales[a][piece].scale * product[line];
          if (KEY_BIAS) {
            score[line] += scales[a][piece].bias * query_sum[line][piece];
          }
        }
      }
      int line_of = 0;
      int same = 0;
      ADD_UP(1, TILE, LEFT_2)
      ADD_UP(2, LEFT_2, LEFT_4)
      ADD_UP(4, LEFT_4, LEFT_8)
      ADD_UP(8, LEFT_8, LEFT_16)
      ADD_UP(16, LEFT_16, LEFT)
      if ((lane & same) == 0) {
        const int column = base + a * KEY_COLUMNS + lane / KEY_LANES;
        UNROLL for (int line = 0; line < LEFT; line++) {
          pool[column * ALL_LINES + tile * TILE + line_of + line] = score[line];
        }
      }
    }
  }
}
BARRIER;
constexpr int TURN = PARTS * VALUE_COLUMNS * AHEAD;
const int rounded = (count + TURN - 1) / TURN * TURN;
for (int line = simd; line < LINES; line += SIMDS) {
  float top = LOWEST;
  for (int column = lane; column < count; column += 32) {
    top = max(top, pool[column * ALL_LINES + line]);
  }
  UNROLL for (int other = 1; other < 32; other *= 2) {
    top = max(top, SHUFFLE_XOR(top, other));
  }
  float sum = 0.0f;
  for (int column = lane; column < rounded; column += 32) {
    const float weight = column < count ? EXP2(pool[column * ALL_LINES + line] - top) : 0.0f;
    pool[column * ALL_LINES + line] = weight;
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
  const int place = lane % VALUE_LANES;
  float total[TILE][VALUE_EACH];
  float bias_total[TILE][VALUE_PIECES];
  UNROLL for (int line = 0; line < TILE; line++) {
    UNROLL for (int i = 0; i < VALUE_EACH; i++) {
      total[line][i] = 0.0f;
    }
    UNROLL for (int piece = 0; piece < VALUE_PIECES; piece++) {
      bias_total[line][piece] = 0.0f;
    }
  }
  const uint32_t own = lane / VALUE_LANES * step;
  const GLOBAL uint32_t* codes = first + VALUE_CODES + place * VALUE_EACH * VALUE_BITS / 32;
  const int shift = place * VALUE_EACH * VALUE_BITS % 32;
  const GLOBAL uint32_t* groups = first + VALUE_SCALES;
  KEEP(codes);
  KEEP(groups);
  for (int base = part * VALUE_COLUMNS * AHEAD; base < count; base += TURN) {
    Words<VALUE_WORDS> runs[AHEAD];
    Scale scales[AHEAD][VALUE_PIECES];
    UNROLL for (int a = 0; a < AHEAD; a++) {
      const uint32_t at = min((base + a * VALUE_COLUMNS) * step + own, last);
      runs[a] = load_run<VALUE_EACH, VALUE_BITS, VALUE_WIDE>(codes + at, shift);
      UNROLL for (int piece = 0; piece < VALUE_PIECES; piece++) {
        scales[a][piece] = scale_of<T, VALUE_FORM, VALUE_BITS>(
            groups, at, (place * VALUE_EACH + piece * VALUE_PIECE) / VALUE_GROUP);
      }
    }
    UNROLL for (int a = 0; a < AHEAD; a++) {
      const int column = base + a * VALUE_COLUMNS + lane / VALUE_LANES;
      float weight[TILE];
      UNROLL for (int line = 0; line < TILE; line++) {
        weight[line] = pool[column * ALL_LINES + tile * TILE + line];
      }
      UNROLL for (int piece = 0; piece < VALUE_PIECES; piece++) {
        float scaled[TILE];
        UNROLL for (int line = 0; line < TILE; line++) {
          scaled[line] = weight[line] * scales[a][piece].scale;
          if (VALUE_BIAS) {
            bias_total[line][piece] += weight[line] * scales[a][piece].bias;
          }
        }
        UNROLL for (int i = piece * VALUE_PIECE; i < (piece + 1) * VALUE_PIECE; i++) {
          const float number = number_of<T, VALUE_FORM, VALUE_BITS>(runs[a], i);
          UNROLL for (int line = 0; line < TILE; line++) {
            total[line][i] += scaled[line] * number;
          }
        }
      }
    }
  }
  BARRIER;
  UNROLL for (int line = 0; line < TILE; line++) {
    UNROLL for (int i = 0; i < VALUE_EACH; i++) {
      float number = total[line][i] * unit_of<VALUE_FORM, VALUE_BITS>(i) +
          (VALUE_BIAS ? bias_total[line][i / VALUE_PIECE] : 0.0f);
      UNROLL for (int other = VALUE_LANES; other < 32; other *= 2) {
        number += SHUFFLE_XOR(number, other);
      }
      if (lane < VALUE_LANES) {
        pool[(part * ALL_LINES + tile * TILE + line) * VALUE_SIZE + place * VALUE_EACH + i] = number;
      }
    }
  }
}
}
#define OWN_START  // nothing: finish.h reads outputs as they are
#define OWN_PART(part) pool[((part) * ALL_LINES + line) * VALUE_SIZE + number]
#define OWN_TOP pool[ENDS + 2 * line]
#define OWN_SUM pool[ENDS + 2 * line + 1]
