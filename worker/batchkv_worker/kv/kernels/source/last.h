// The threadgroup of a row and KV head that comes here last joins the splits of all, in order; the
// others end. So the result does not depend on which it is. Input: counters, a zero for each row and
// KV head, which are zeros again afterwards. So no other kernel may use them at the same time. join.h
// follows, and ends the loops.
LOCAL uint32_t* const is_last = reinterpret_cast<LOCAL uint32_t*>(pool);
const int num_splits = min((length + SPLIT - 1) / SPLIT, int(GROUPS_Y));
ALL_SEE;
BARRIER;
if (THREAD_X == 0) {
  *is_last = IS_LAST(counters + row * GROUPS_X + head, uint32_t(max(num_splits, 1)));
  ALL_SEE;
}
BARRIER;
if (*is_last == 0) {
  return;
}
for (int line = THREAD_X / 32; line < LINES; line += THREADS / 32) {
constexpr int STRIDE = LINES * (VALUE_SIZE + 2);  // from one split to the next
const int query_head = head * LINES + line;
const GLOBAL float* own = splits + (row * int64_t(GROUPS_X) + head) * GROUPS_Y * STRIDE +
    line * (VALUE_SIZE + 2);
for (int number = THREAD_X % 32; number < VALUE_SIZE; number += 32) {
#define SPLIT_NUMBER(split) SEEN(own + (split) * STRIDE + number)
#define SPLIT_TOP(split) SEEN(own + (split) * STRIDE + VALUE_SIZE)
#define SPLIT_SUM(split) SEEN(own + (split) * STRIDE + VALUE_SIZE + 1)
