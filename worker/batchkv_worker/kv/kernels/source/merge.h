// Joins the splits of each row, after the partial results of its shared prefixes, before the sink.
// Inputs: splits, bounds; where PREFIXES: scores, values, chain; where SINKS: sinks. Output: out;
// where ALONE, also the logarithm of the sum of exponentials, with the KV heads first.
constexpr int STRIDE = VALUE_SIZE + 2;
const int i = THREAD_X;
const int query_head = GROUP_Y;
const int row = GROUP_Z;
const int head = query_head / LINES;
const int line = query_head % LINES;
const int length = bounds[2 * row + 1] - bounds[2 * row];
const int count = min((max(length, 0) + SPLIT - 1) / SPLIT, int(splits_shape[2]));
const GLOBAL float* own = splits +
    ((row * int64_t(splits_shape[1]) + head) * splits_shape[2] * LINES + line) * STRIDE;

float top = LOWEST;
#if PREFIXES
for (int depth = 0; depth < DEPTH; depth++) {
  const int64_t entry = chain[row * DEPTH + depth];
  if (entry >= 0) {
    top = max(top, LOG2E * scores[head * int64_t(scores_strides[0]) +
                                  entry * int64_t(scores_strides[1]) +
                                  line * int64_t(scores_strides[2])]);
  }
}
#endif
for (int split = 0; split < count; split++) {
  top = max(top, own[split * LINES * STRIDE + VALUE_SIZE]);
}
#if SINKS
top = max(top, LOG2E * sinks[query_head]);
#endif

float sum = 0.0f;
float number = 0.0f;
#if PREFIXES
for (int depth = 0; depth < DEPTH; depth++) {
  const int64_t entry = chain[row * DEPTH + depth];
  if (entry >= 0) {
    const float weight = EXP2(LOG2E * scores[head * int64_t(scores_strides[0]) +
                                             entry * int64_t(scores_strides[1]) +
                                             line * int64_t(scores_strides[2])] - top);
    sum += weight;
    number += weight * float(values[head * int64_t(values_strides[0]) +
                                    entry * int64_t(values_strides[1]) +
                                    line * int64_t(values_strides[2]) +
                                    i * int64_t(values_strides[3])]);
  }
}
#endif
for (int split = 0; split < count; split++) {
  const GLOBAL float* one = own + split * LINES * STRIDE;
  const float weight = EXP2(one[VALUE_SIZE] - top);
  sum += weight * one[VALUE_SIZE + 1];
  number += weight * one[i];
}
#if SINKS
sum += EXP2(LOG2E * sinks[query_head] - top);
#endif
const T result = static_cast<T>(sum > 0.0f ? number / sum : 0.0f);
#if ALONE
const int64_t place = (int64_t(head) * GROUPS_Z + row) * LINES + line;
out[place * VALUE_SIZE + i] = result;
if (i == 0) {
  score[place] = sum > 0.0f ? (top + LOG2(sum)) / LOG2E : LOWEST;
}
#else
out[(int64_t(row) * GROUPS_Y + query_head) * VALUE_SIZE + i] = result;
#endif
