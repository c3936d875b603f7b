// Draws one of the likeliest tokens of each row. Inputs: logits, of which a row's numbers lie side by
// side, and for each row in `given` its temperature, top_p, top_k, the logarithm of min_p, and a point
// in [0, 1). Output: tokens. A threadgroup has THREADS threads and one row. A row whose top_k is 0 has
// the token 0.
//
// The top_k largest are at least as large as the top_k-th largest of the threads' maxima: so a few
// candidates are left, which are sorted by comparing each with each. If equal numbers are so many that
// these have no room, the top_k-th number is found bit by bit.
//
// What lies in `pool`: a word for each thread; keys and indexes of candidates; keys and indexes by
// rank; which of them the filters leave; their order by index; three single words.
constexpr int KEYS = THREADS;
constexpr int INDEXES = KEYS + CAPACITY;
constexpr int RANKED = INDEXES + CAPACITY;
constexpr int RANKED_INDEXES = RANKED + MOST;
constexpr int KEPT = RANKED_INDEXES + MOST;
constexpr int ORDER = KEPT + MOST;
constexpr int COUNT = ORDER + MOST;
constexpr int LIMIT = COUNT + 1;
constexpr int HIGHEST = LIMIT + 1;
LOCAL_ARRAY(uint32_t, pool, HIGHEST + 1);
// Numbers of all threads, added up in the order of the threads.
#define ADD_UP_ALL(number)                                   \
  UNROLL for (int other = 1; other < 32; other *= 2) {       \
    number += SHUFFLE_XOR(number, other);                    \
  }                                                          \
  BARRIER;                                                   \
  if (thread_in_row % 32 == 0) {                             \
    pool[thread_in_row / 32] = AS_UINT(number);              \
  }                                                          \
  BARRIER;                                                   \
  number = 0.0f;                                             \
  for (int simd = 0; simd < THREADS / 32; simd++) {          \
    number += AS_FLOAT(pool[simd]);                          \
  }

const int thread_in_row = THREAD_X;
const int row = GROUP_X;
const GLOBAL float* own = logits + row * int64_t(logits_strides[0]);
const GLOBAL float* parameters = given + 5 * row;
const int total = logits_shape[1];
const int top_k = min(int(parameters[2]), min(total, MOST));
if (top_k <= 0) {
  if (thread_in_row == 0) {
    tokens[row] = 0;
  }
  return;
}
float most = LOWEST_NUMBER;
for (int i = thread_in_row; i < total; i += THREADS) {
  most = max(most, own[i]);
}
const uint32_t own_key = key_of(most);
pool[thread_in_row] = own_key;
if (thread_in_row == 0) {
  pool[COUNT] = 0;
}
BARRIER;
int rank = 0;
for (int i = 0; i < THREADS; i++) {
  const uint32_t key = pool[i];
  rank += key > own_key || (key == own_key && i < thread_in_row) ? 1 : 0;
}
if (rank == 0) {
  pool[HIGHEST] = own_key;
}
if (rank == top_k - 1) {
  pool[LIMIT] = own_key;
}
BARRIER;
const float highest = number_of_key(pool[HIGHEST]);
const uint32_t limit = pool[LIMIT];
float sum = 0.0f;
for (int i = thread_in_row; i < total; i += THREADS) {
  const float number = own[i];
  sum += EXP2(LOG2E * (number - highest));
  if (key_of(number) >= limit && number > LOWEST_NUMBER) {
    const int place = ADD_ONE(pool + COUNT);
    if (place < CAPACITY) {
      pool[KEYS + place] = key_of(number);
      pool[INDEXES + place] = i;
    }
  }
}
ADD_UP_ALL(sum)
BARRIER;
int count = pool[COUNT];
if (count > CAPACITY) {
  uint32_t least = limit;  // at least top_k numbers have this key or a larger one
  for (int bit = 31; bit >= 0; bit--) {
    const uint32_t tried = least + (1u << bit);
    float num_larger = 0.0f;
    if (tried > least) {
      for (int i = thread_in_row; i < total; i += THREADS) {
        num_larger += key_of(own[i]) >= tried ? 1.0f : 0.0f;
      }
    }
    ADD_UP_ALL(num_larger)
    if (num_larger >= top_k) {
      least = tried;
    }
  }
  // All larger ones, and of those that are equal the first.
  const int each = (total + THREADS - 1) / THREADS;
  const int begin = min(thread_in_row * each, total);
  const int end = min(begin + each, total);
  float num_larger = 0.0f;
  int num_equal = 0;
  for (int i = begin; i < end; i++) {
    num_larger += key_of(own[i]) > least ? 1.0f : 0.0f;
    num_equal += key_of(own[i]) == least ? 1 : 0;
  }
  ADD_UP_ALL(num_larger)
  BARRIER;
  pool[thread_in_row] = num_equal;
  if (thread_in_row == 0) {
    pool[COUNT] = 0;
  }
  BARRIER;
  int num_before = 0;
  for (int i = 0; i < thread_in_row; i++) {
    num_before += pool[i];
  }
  for (int i = begin; i < end; i++) {
    const uint32_t key = key_of(own[i]);
    const bool is_equal = key == least && num_before < top_k - int(num_larger);
    num_before += key == least ? 1 : 0;
    if (key > least || is_equal) {
      const int place = ADD_ONE(pool + COUNT);
      pool[KEYS + place] = key;
      pool[INDEXES + place] = i;
    }
  }
  BARRIER;
  count = pool[COUNT];
}
for (int i = thread_in_row; i < count; i += THREADS) {
  const uint32_t key = pool[KEYS + i];
  const uint32_t index = pool[INDEXES + i];
  int place = 0;
  for (int other = 0; other < count; other++) {
    const uint32_t other_key = pool[KEYS + other];
    place += other_key > key || (other_key == key && pool[INDEXES + other] < index) ? 1 : 0;
  }
  if (place < top_k) {
    pool[RANKED + place] = key;
    pool[RANKED_INDEXES + place] = index;
  }
}
BARRIER;
const int num_ranked = min(count, top_k);
if (thread_in_row == 0) {
  const float log_sum = highest + LOG2(sum) / LOG2E;
  float above = 0.0f;
  for (int i = 0; i < num_ranked; i++) {
    const float number = number_of_key(pool[RANKED + i]);
    const bool is_likely = above < parameters[1] && number - highest >= parameters[3];
    pool[KEPT + i] = i == 0 || is_likely ? 1 : 0;
    above += EXP2(LOG2E * (number - log_sum));
  }
}
BARRIER;
int num_kept = 0;
for (int i = 0; i < num_ranked; i++) {
  num_kept += pool[KEPT + i];
}
if (thread_in_row < num_ranked && pool[KEPT + thread_in_row]) {
  const uint32_t index = pool[RANKED_INDEXES + thread_in_row];
  int place = 0;
  for (int other = 0; other < num_ranked; other++) {
    place += pool[KEPT + other] && pool[RANKED_INDEXES + other] < index ? 1 : 0;
  }
  pool[ORDER + place] = thread_in_row;
}
BARRIER;
#define WEIGHT(i) \
  EXP2(LOG2E * (number_of_key(pool[RANKED + pool[ORDER + (i)]]) - highest) / parameters[0])
if (thread_in_row == 0) {
  float weights = 0.0f;
  for (int i = 0; i < num_kept; i++) {
    weights += WEIGHT(i);
  }
  float passed = 0.0f;
  int chosen = 0;
  for (int i = 0; i < num_kept; i++) {
    const float weight = WEIGHT(i);
    if (weight > 0.0f && passed <= parameters[4] * weights) {
      chosen = i;  // the last one whose weights before it do not pass the point
    }
    passed += weight;
  }
  tokens[row] = num_kept > 0 ? pool[RANKED_INDEXES + pool[ORDER + chosen]] : 0;
}
