// One number of a row's result: of its shared prefixes, then its splits, then its sink. Inputs: where
// PREFIXES, scores, values and chain; where SINKS, sinks. Output: out; where ALONE, also score, the
// logarithm of the sum of exponentials, and both with the KV heads first.
#define PREFIX_SCORE(entry)                                                               \
  (LOG2E * scores[head * int64_t(scores_strides[0]) + entry * int64_t(scores_strides[1]) + \
                  line * int64_t(scores_strides[2])])
float top = LOWEST;
#if PREFIXES
const int DEPTH = chain_shape[1];
for (int depth = 0; depth < DEPTH; depth++) {
  const int64_t entry = chain[row * int64_t(DEPTH) + depth];
  if (entry >= 0) {
    top = max(top, PREFIX_SCORE(entry));
  }
}
#endif
UNROLL_4 for (int i = 0; i < num_splits; i++) {
  top = max(top, SPLIT_TOP(i));
}
#if SINKS
top = max(top, LOG2E * sinks[query_head]);
#endif
float sum = 0.0f;
float total = 0.0f;
#if PREFIXES
for (int depth = 0; depth < DEPTH; depth++) {
  const int64_t entry = chain[row * int64_t(DEPTH) + depth];
  if (entry >= 0) {
    const float weight = EXP2(PREFIX_SCORE(entry) - top);
    sum += weight;
    total += weight * float(values[head * int64_t(values_strides[0]) +
                                   entry * int64_t(values_strides[1]) +
                                   line * int64_t(values_strides[2]) +
                                   number * int64_t(values_strides[3])]);
  }
}
#endif
UNROLL_4 for (int i = 0; i < num_splits; i++) {
  const float weight = EXP2(SPLIT_TOP(i) - top);
  sum += weight * SPLIT_SUM(i);
  total += weight * SPLIT_NUMBER(i);
}
#if SINKS
sum += EXP2(LOG2E * sinks[query_head] - top);
#endif
const T result = static_cast<T>(sum > 0.0f ? total / sum : 0.0f);
#if ALONE
const int64_t place = (int64_t(head) * GROUPS_Z + row) * LINES + line;
out[place * VALUE_SIZE + number] = result;
if (number == 0) {
  score[place] = sum > 0.0f ? (top + LOG2(sum)) / LOG2E : LOWEST;
}
#else
out[(int64_t(row) * num_heads + query_head) * VALUE_SIZE + number] = result;
#endif
}
#ifdef OWN_START  // the loop over lines of finish.h
}
#endif
