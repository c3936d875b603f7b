// Joins the splits of each row. Inputs: splits, bounds, and those of join.h, which follows.
{
const int number = THREAD_X;
const int query_head = GROUP_Y;
const int row = GROUP_Z;
const int head = query_head / LINES;
const int line = query_head % LINES;
const int num_heads = GROUPS_Y;
const int length = bounds[2 * row + 1] - bounds[2 * row];
const int num_splits = min((max(length, 0) + SPLIT - 1) / SPLIT, int(splits_shape[2]));
constexpr int STRIDE = LINES * (VALUE_SIZE + 2);  // from one split to the next
const GLOBAL float* own = splits + (row * int64_t(splits_shape[1]) + head) * splits_shape[2] * STRIDE +
    line * (VALUE_SIZE + 2);
#define SPLIT_NUMBER(split) own[(split) * STRIDE + number]
#define SPLIT_TOP(split) own[(split) * STRIDE + VALUE_SIZE]
#define SPLIT_SUM(split) own[(split) * STRIDE + VALUE_SIZE + 1]
