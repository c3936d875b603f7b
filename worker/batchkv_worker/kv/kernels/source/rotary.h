// Queries and keys of a token of each row: each head's vector is divided by the root of its mean
// square, times the norm's weights, and turned by the token's position. A simdgroup has a vector of
// each of its HEADS heads, whose angles are the same: the first QUERY_HEADS of a token are those of
// queries. Results are rounded where MLX's operations round.
constexpr int HALF = SIZE / 2;
constexpr int RUN = READS_WIDE && HALF % 2 == 0 && TURNED % 2 == 0 ? 2 : 1;  // pairs side by side
constexpr int RUNS = (HALF / RUN + 31) / 32;
const int row = GROUP_Y;
const int token = GROUP_Z;
const int lane = THREAD_X % 32;
const int simd = GROUP_X * SIMDS + THREAD_X / 32;
float sines[RUNS * RUN];
float cosines[RUNS * RUN];
UNROLL for (int i = 0; i < RUNS * RUN; i++) {
  const int pair = RUN * (lane + 32 * (i / RUN)) + i % RUN;
  sines[i] = 0.0f;
  cosines[i] = 1.0f;
  if (pair < TURNED) {
    const Turned one = sine_and_cosine(float(offsets[row] + token) * frequencies[pair]);
    sines[i] = one.sine;
    cosines[i] = one.cosine;
  }
}
UNROLL for (int number = 0; number < HEADS; number++) {
  const int place = simd + number * GROUPS_X * SIMDS;
  const bool is_query = place < QUERY_HEADS;
  const int head = is_query ? place : place - QUERY_HEADS;
  if (place < QUERY_HEADS + KEY_HEADS) {
    const GLOBAL T* from;
    int64_t step;
    if (is_query) {
      from = queries + row * int64_t(queries_strides[0]) + token * int64_t(queries_strides[1]) +
          head * int64_t(queries_strides[2]);
      step = queries_strides[3];
    } else {
      from = keys + row * int64_t(keys_strides[0]) + token * int64_t(keys_strides[1]) +
          head * int64_t(keys_strides[2]);
      step = keys_strides[3];
    }
    float first[RUNS * RUN];
    float second[RUNS * RUN];
    float sum = 0.0f;
    UNROLL for (int i = 0; i < RUNS; i++) {
      const int pair = RUN * (lane + 32 * i);
      const bool is_apart = pair < TURNED && !NEIGHBOURS;
      UNROLL for (int j = 0; j < RUN; j++) {
        first[i * RUN + j] = 0.0f;
        second[i * RUN + j] = 0.0f;
      }
      if (pair < HALF) {
        if constexpr (RUN == 2) {
          const Two one = read_two<T>(from + (is_apart ? pair : 2 * pair) * step, step);
          const Two other = read_two<T>(from + (is_apart ? pair + TURNED : 2 * pair + 2) * step, step);
          first[2 * i] = one.low;
          first[2 * i + 1] = is_apart ? one.high : other.low;
          second[2 * i] = is_apart ? other.low : one.high;
          second[2 * i + 1] = other.high;
        } else {
          first[i] = float(from[(is_apart ? pair : 2 * pair) * step]);
          second[i] = float(from[(is_apart ? pair + TURNED : 2 * pair + 1) * step]);
        }
      }
      UNROLL for (int j = 0; j < RUN; j++) {
        const int at = i * RUN + j;
        sum += first[at] * first[at] + second[at] * second[at];
      }
    }
    UNROLL for (int other = 16; other > 0; other /= 2) {
      sum += SHUFFLE_XOR(sum, other);
    }
    const float epsilon = is_query ? AS_FLOAT(QUERY_EPS) : AS_FLOAT(KEY_EPS);
    const float factor = 1.0f / ROOT(sum / SIZE + epsilon);
    const GLOBAL T* weights = is_query ? query_weights : key_weights;
    GLOBAL T* to = is_query
        ? turned_queries + ((row * int64_t(QUERY_HEADS) + head) * GROUPS_Z + token) * SIZE
        : turned_keys + ((row * int64_t(KEY_HEADS) + head) * GROUPS_Z + token) * SIZE;
    UNROLL for (int i = 0; i < RUNS; i++) {
      const int pair = RUN * (lane + 32 * i);
      const bool is_apart = pair < TURNED && !NEIGHBOURS;
      if (pair < HALF) {
        float low[RUN];
        float high[RUN];
        UNROLL for (int j = 0; j < RUN; j++) {
          const int at = i * RUN + j;
          const int one = is_apart ? pair + j : 2 * (pair + j);
          const int other = is_apart ? pair + j + TURNED : 2 * (pair + j) + 1;
          const float x = float(static_cast<T>(float(weights[one]) * float(static_cast<T>(first[at] * factor))));
          const float y = float(static_cast<T>(float(weights[other]) * float(static_cast<T>(second[at] * factor))));
          low[j] = pair < TURNED ? x * cosines[at] - y * sines[at] : x;
          high[j] = pair < TURNED ? x * sines[at] + y * cosines[at] : y;
        }
        if constexpr (RUN == 2) {
          const Two one = {low[0], is_apart ? low[1] : high[0]};
          const Two other = {is_apart ? high[0] : low[1], high[1]};
          write_two<T>(one, to + (is_apart ? pair : 2 * pair));
          write_two<T>(other, to + (is_apart ? pair + TURNED : 2 * pair + 2));
        } else {
          to[is_apart ? pair : 2 * pair] = static_cast<T>(low[0]);
          to[is_apart ? pair + TURNED : 2 * pair + 1] = static_cast<T>(high[0]);
        }
      }
    }
  }
}
