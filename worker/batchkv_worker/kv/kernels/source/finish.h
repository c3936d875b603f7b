// The result of one split: for each row, KV head, split and query head the weighted values, not
// divided, then the zero of scores and the sum of weights. Where JOINED, no row has more than one
// split, and the result is that of join.h, which follows.
BARRIER;
const int num_heads = GROUPS_X * LINES;
for (int line = THREAD_X / 32; line < LINES; line += THREADS / 32)
for (int number = THREAD_X % 32; number < VALUE_SIZE; number += 32) {
  float own = 0.0f;
  if (count > 0) {
    UNROLL for (int other = 0; other < PARTS; other++) {
      own += OWN_PART(other);
    }
  }
#if JOINED
  const int query_head = head * LINES + line;
  const int num_splits = count > 0 ? 1 : 0;
#define SPLIT_NUMBER(split) own
#define SPLIT_TOP(split) OWN_TOP
#define SPLIT_SUM(split) OWN_SUM
#else
  GLOBAL float* to = splits + (((int64_t(row) * GROUPS_X + head) * GROUPS_Y + split) * LINES + line) *
      (VALUE_SIZE + 2);
  to[number] = own;
  if (number < 2) {
    to[VALUE_SIZE + number] = number == 0 ? OWN_TOP : OWN_SUM;
  }
}
#endif
