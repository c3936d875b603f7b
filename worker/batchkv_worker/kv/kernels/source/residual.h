// What a layer's part adds to each token's numbers, and the norm of the sums. Inputs x, added and the
// norm's weights; outputs sums and normed. A threadgroup has one token. Results are rounded where
// MLX's operations round.
constexpr int THREADS = 32 * SIMDS;
constexpr int RUN = READS_WIDE && SIZE % 8 == 0 ? 8 : 1;  // numbers next to each other
constexpr int RUNS = (SIZE / RUN + THREADS - 1) / THREADS;
LOCAL_ARRAY(float, squares, SIMDS);
const int token = GROUP_X;
const int row = GROUP_Y;
const int64_t x_at = row * int64_t(x_strides[0]) + token * int64_t(x_strides[1]);
const int64_t added_at = row * int64_t(added_strides[0]) + token * int64_t(added_strides[1]);
const int64_t to = (row * int64_t(GROUPS_X) + token) * SIZE;
float numbers[RUNS * RUN];
float square = 0.0f;
UNROLL for (int i = 0; i < RUNS; i++) {
  const int place = RUN * (THREAD_X + THREADS * i);
  UNROLL for (int j = 0; j < RUN; j++) {
    numbers[i * RUN + j] = 0.0f;
  }
  if (place < SIZE) {
    if constexpr (RUN == 8) {
      const Eight one = read_eight<T>(x + x_at + place * int64_t(x_strides[2]), x_strides[2]);
      const Eight other =
          read_eight<T>(added + added_at + place * int64_t(added_strides[2]), added_strides[2]);
      Eight sum;
      UNROLL for (int j = 0; j < 8; j++) {
        sum.at[j] = float(static_cast<T>(one.at[j] + other.at[j]));
        numbers[i * 8 + j] = sum.at[j];
      }
      write_eight<T>(sum, sums + to, place / 8);
    } else {
      const T sum = static_cast<T>(
          float(x[x_at + place * int64_t(x_strides[2])]) +
          float(added[added_at + place * int64_t(added_strides[2])]));
      sums[to + place] = sum;
      numbers[i] = float(sum);
    }
  }
  UNROLL for (int j = 0; j < RUN; j++) {
    square += numbers[i * RUN + j] * numbers[i * RUN + j];
  }
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
UNROLL for (int i = 0; i < RUNS; i++) {
  const int place = RUN * (THREAD_X + THREADS * i);
  if (place < SIZE) {
    if constexpr (RUN == 8) {
      Eight scaled = read_eight<T>(weights + place, 1);
      UNROLL for (int j = 0; j < 8; j++) {
        scaled.at[j] *= float(static_cast<T>(numbers[i * 8 + j] * factor));
      }
      write_eight<T>(scaled, normed + to, place / 8);
    } else {
      const float scaled = float(static_cast<T>(numbers[i] * factor));
      normed[to + place] = static_cast<T>(float(weights[place]) * scaled);
    }
  }
}
