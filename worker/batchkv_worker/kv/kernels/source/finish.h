// The result of one split: for each row, KV head, split and query head the weighted values, not
// divided, then the highest score and the sum of weights. Where JOINED, no row has more than one
// split, and the result is that of join.h, which follows.
BARRIER;
const int num_heads = GROUPS_X * LINES;
for (int i = THREAD_X; i < LINES * VALUE_SIZE; i += THREADS) {
  const int line = i / VALUE_SIZE;
  const int number = i % VALUE_SIZE;
  float own = 0.0f;
  if (count > 0) {
    UNROLL for (int other = 0; other < PARTS; other++) {
      own += OWN_NUMBER(i, other);
    }
  }
#if JOINED
  const int query_head = head * LINES + line;
  const int num_splits = count > 0 ? 1 : 0;
#define SPLIT_NUMBER(split) own
#define SPLIT_TOP(split) pool[ENDS + 2 * line]
#define SPLIT_SUM(split) pool[ENDS + 2 * line + 1]
#else
  GLOBAL float* to = splits + (((int64_t(row) * GROUPS_X + head) * GROUPS_Y + split) * LINES + line) *
      (VALUE_SIZE + 2);
  to[number] = own;
  if (number < 2) {
    to[VALUE_SIZE + number] = pool[ENDS + 2 * line + number];
  }
}
#endif
