// What a layer's part adds to each token's numbers, and the norm of the sums. Inputs x, added and the
// norm's weights; outputs sums and normed. A threadgroup has one token. Results are rounded where
// MLX's operations round.
constexpr int THREADS = 32 * SIMDS;
constexpr int EACH = (SIZE + THREADS - 1) / THREADS;
LOCAL_ARRAY(float, squares, SIMDS);
const int token = GROUP_X;
const int row = GROUP_Y;
const int64_t x_at = row * int64_t(x_strides[0]) + token * int64_t(x_strides[1]);
const int64_t added_at = row * int64_t(added_strides[0]) + token * int64_t(added_strides[1]);
const int64_t to = (row * int64_t(GROUPS_X) + token) * SIZE;
float numbers[EACH];
float square = 0.0f;
UNROLL for (int i = 0; i < EACH; i++) {
  const int place = THREAD_X + THREADS * i;
  numbers[i] = 0.0f;
  if (place < SIZE) {
    const T sum = static_cast<T>(
        float(x[x_at + place * int64_t(x_strides[2])]) +
        float(added[added_at + place * int64_t(added_strides[2])]));
    sums[to + place] = sum;
    numbers[i] = float(sum);
  }
  square += numbers[i] * numbers[i];
}
UNROLL for (int lane = 16; lane > 0; lane /= 2) {
  square += SHUFFLE_XOR(square, lane);
}
if (THREAD_X % 32 == 0) {
  squares[THREAD_X / 32] = square;
}
BARRIER;
float all = 0.0f;
UNROLL for (int i = 0; i < SIMDS; i++) {
  all += squares[i];
}
const float factor = 1.0f / ROOT(all / SIZE + AS_FLOAT(EPSILON));
UNROLL for (int i = 0; i < EACH; i++) {
  const int place = THREAD_X + THREADS * i;
  if (place < SIZE) {
    const float scaled = float(static_cast<T>(numbers[i] * factor));
    normed[to + place] = static_cast<T>(float(weights[place]) * scaled);
  }
}
