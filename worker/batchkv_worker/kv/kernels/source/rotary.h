// Queries and keys of a token of each row: each head's vector is divided by the root of its mean
// square, times the norm's weights, and turned by the token's position. A simdgroup has one vector:
// the first QUERY_HEADS of a token are those of queries. Results are rounded where MLX's operations
// round.
constexpr int HALF = SIZE / 2;
constexpr int EACH = (HALF + 31) / 32;
const int row = GROUP_Y;
const int token = GROUP_Z;
const int head = GROUP_X < QUERY_HEADS ? GROUP_X : GROUP_X - QUERY_HEADS;
const bool is_query = GROUP_X < QUERY_HEADS;
float first[EACH];
float second[EACH];
float sum = 0.0f;
UNROLL for (int i = 0; i < EACH; i++) {
  const int pair = THREAD_X + 32 * i;
  const int one = pair < TURNED && !NEIGHBOURS ? pair : 2 * pair;
  const int other = pair < TURNED && !NEIGHBOURS ? pair + TURNED : 2 * pair + 1;
  first[i] = 0.0f;
  second[i] = 0.0f;
  if (pair < HALF && is_query) {
    const int64_t start = row * int64_t(queries_strides[0]) +
        token * int64_t(queries_strides[1]) + head * int64_t(queries_strides[2]);
    first[i] = float(queries[start + one * int64_t(queries_strides[3])]);
    second[i] = float(queries[start + other * int64_t(queries_strides[3])]);
  } else if (pair < HALF) {
    const int64_t start = row * int64_t(keys_strides[0]) + token * int64_t(keys_strides[1]) +
        head * int64_t(keys_strides[2]);
    first[i] = float(keys[start + one * int64_t(keys_strides[3])]);
    second[i] = float(keys[start + other * int64_t(keys_strides[3])]);
  }
  sum += first[i] * first[i] + second[i] * second[i];
}
UNROLL for (int lane = 16; lane > 0; lane /= 2) {
  sum += SHUFFLE_XOR(sum, lane);
}
const float factor = 1.0f / ROOT(sum / SIZE + (is_query ? AS_FLOAT(QUERY_EPS) : AS_FLOAT(KEY_EPS)));
UNROLL for (int i = 0; i < EACH; i++) {
  const int pair = THREAD_X + 32 * i;
  if (pair < HALF) {
    const int one = pair < TURNED && !NEIGHBOURS ? pair : 2 * pair;
    const int other = pair < TURNED && !NEIGHBOURS ? pair + TURNED : 2 * pair + 1;
    const float weight = is_query ? float(query_weights[one]) : float(key_weights[one]);
    const float next = is_query ? float(query_weights[other]) : float(key_weights[other]);
    const float x = float(static_cast<T>(weight * float(static_cast<T>(first[i] * factor))));
    const float y = float(static_cast<T>(next * float(static_cast<T>(second[i] * factor))));
    T low = static_cast<T>(x);
    T high = static_cast<T>(y);
    if (pair < TURNED) {
      const float angle = float(offsets[row] + token) * frequencies[pair];
      const Turned turned = turned_by(angle, x, y);
      low = static_cast<T>(turned.low);
      high = static_cast<T>(turned.high);
    }
    if (is_query) {
      const int64_t to = ((row * int64_t(QUERY_HEADS) + head) * GROUPS_Z + token) * SIZE;
      turned_queries[to + one] = low;
      turned_queries[to + other] = high;
    } else {
      const int64_t to =
          ((row * int64_t(GROUPS_X - QUERY_HEADS) + head) * GROUPS_Z + token) * SIZE;
      turned_keys[to + one] = low;
      turned_keys[to + other] = high;
    }
  }
}
