// The result of one split: for each row, KV head, split and query head the weighted values, not
// divided, then the zero of scores and the sum of weights. Where JOINED, no row has more than one
// split, and the result is that of join.h, which follows and ends the loops. Where LAST, last.h
// follows. OWN_START computes what all numbers of a line need.
BARRIER;
const int num_heads = GROUPS_X * LINES;
#if JOINED || LAST
#define HAS_COLUMNS (count > 0)
#else
#define HAS_COLUMNS true
#endif
for (int line = THREAD_X / 32; line < LINES; line += THREADS / 32) {
OWN_START
#if !JOINED
GLOBAL float* const to = splits + (VALUE_SIZE + 2) *
    (((int64_t(row) * GROUPS_X + head) * GROUPS_Y + split) * LINES + line);
if (THREAD_X % 32 < 2) {
  to[VALUE_SIZE + THREAD_X % 32] = THREAD_X % 32 == 0 ? OWN_TOP : OWN_SUM;
}
UNROLL
#endif
for (int first_number = 0; first_number < VALUE_SIZE; first_number += 32) {
  const int number = first_number + THREAD_X % 32;
  if (VALUE_SIZE % 32 != 0 && number >= VALUE_SIZE) {
    break;
  }
  float own = 0.0f;
  if (HAS_COLUMNS) {
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
  to[number] = own;
}
}
#endif
