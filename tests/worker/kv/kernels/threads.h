// The words of the kernels' bodies in plain C++: the threads of a threadgroup take turns on one CPU
// thread. A turn ends where a thread waits for others: at a shuffle, and at a barrier. A simdgroup
// goes on until all of its threads wait at a barrier, so a missing barrier shows; groups alternate
// in which simdgroup goes first. A thread that misses a shuffle or barrier of others is an error.
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// Without <math.h> and <stdlib.h>, which take most of the time to compile.
extern "C" {
void* malloc(size_t);
void free(void*);
float exp2f(float);
float log2f(float);
float rintf(float);
float roundf(float);
float floorf(float);
float ceilf(float);
float sqrtf(float);
float cosf(float);
float sinf(float);
}
static inline float abs(float number) { return __builtin_fabsf(number); }
static inline float floor(float number) { return floorf(number); }
static inline float round(float number) { return roundf(number); }
static inline float ceil(float number) { return ceilf(number); }

#define FN static inline
#define FN_APART static inline
#define GLOBAL
#define UNROLL
#define UNROLL_4
#define BARRIER wait_for_group()
#define DEVICE_BARRIER wait_for_group()
#define SHUFFLE_XOR(number, other) shuffled(number, other)
#define ANY(flag) is_any(flag)
#define LOCAL
#define SIMD_BARRIER shuffled(0.0f, 0)
#define READ_AS(is_local, type, from) READ(type, from)
#define READ(type, from) (*(const GLOBAL type*)(from))
#define KEEP(pointer)
#define MASKED(word, mask) (((word) & (mask)) | 0x4B000000u)
#define EXP2(number) exp2f(number)
#define LOG2(number) log2f(number)
#define ROOT(number) sqrtf(number)
#define GIVEN_BACK(T, scale, code, bias) \
  static_cast<T>(float(static_cast<T>(float(scale) * float(code))) + float(bias))
#define SINE_COSINE(number, sine, cosine) (sine = sinf(number), cosine = cosf(number))
#define AS_FLOAT(bits) as<float>(uint32_t(bits))
#define AS_UINT(number) as<uint32_t>(float(number))
#define FROM_BITS(type, bits) as<type>(uint16_t(bits))
#define TO_BITS(type, number) as<uint16_t>(static_cast<type>(number))
#define LOWER(type, word) float(FROM_BITS(type, word))
#define UPPER(type, word) float(FROM_BITS(type, (word) >> 16))
#define ADD_ONE(counter) ((*(counter))++)
#define IS_LAST(counter, number) is_last_of((uint32_t*)(counter), number)
#define ALL_SEE
#define SEEN(number) (*(number))
#ifndef READS_WIDE
#define READS_WIDE 1
#endif
#define IS_ALIGNED(pointer, bytes) (uint64_t(pointer) % (bytes) == 0)
#ifndef AS_ON_GPU
#define AS_ON_GPU 0
#endif
// Thread 0 comes first or last; in both cases no other has written yet when memory is filled.
#define LOCAL_ARRAY(type, name, count)                        \
  static type name[count];                                    \
  if (is_first_turn) memset((void*)name, 0xFF, sizeof(name)); \
  is_first_turn = false

template <typename TO, typename FROM>
static inline TO as(FROM from) {
  TO to;
  memcpy(&to, &from, sizeof(TO));
  return to;
}


static inline uint32_t is_last_of(uint32_t* counter, uint32_t number) {
  const uint32_t most = number - 1, old = *counter;
  *counter = old >= most ? 0 : old + 1;
  return old == most;
}

template <typename N>
static inline N min(N one, N other) {
  return other < one ? other : one;
}
template <typename N>
static inline N max(N one, N other) {
  return one < other ? other : one;
}

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float number) {
    const uint32_t all = as<uint32_t>(number);
    bits = number != number ? 0x7FC0 : (all + 0x7FFF + ((all >> 16) & 1)) >> 16;
  }
  operator float() const { return as<float>(uint32_t(bits) << 16); }
};

struct half {
  uint16_t bits;
  half() = default;
  explicit half(float number) {
    const uint32_t all = as<uint32_t>(number);
    const uint32_t sign = (all >> 16) & 0x8000;
    const float size = __builtin_fabsf(number);
    if (number != number) {
      bits = sign | 0x7E00;
    } else if (size >= 65520.0f) {
      bits = sign | 0x7C00;
    } else if (size < 6.103515625e-05f) {
      bits = sign | uint32_t(rintf(size * 16777216.0f));
    } else {
      const uint32_t kept = as<uint32_t>(size) - (112u << 23);
      bits = sign | ((kept + 0xFFF + ((kept >> 13) & 1)) >> 13);
    }
  }
  operator float() const {
    const uint32_t size = bits & 0x7FFF;
    const float number = size < 0x400 ? size * 5.9604644775390625e-08f
        : size >= 0x7C00 ? as<float>((size << 13) | 0x7F800000)
                         : as<float>((size << 13) + (112u << 23));
    return bits & 0x8000 ? -number : number;
  }
};

extern "C" int planted, is_backward;
int planted = -1;
int is_backward = 0;  // whether threadgroups run from the last one to the first
#define FAULT(number) (planted == number)

constexpr int MOST_THREADS = 512;
constexpr int STACK_BYTES = 65536;
constexpr int MOST_TURNS = 1 << 24;
static jmp_buf next_turn, turns[MOST_THREADS], failure;
static ucontext_t starting, contexts[MOST_THREADS];
static char* stacks;
static int num_threads, thread;
static int num_shuffles[MOST_THREADS], num_barriers[MOST_THREADS];
static bool is_done[MOST_THREADS], is_waiting[MOST_THREADS], is_first_turn;
static float shown[2][MOST_THREADS];
static int shown_other[2][MOST_THREADS];
static int GROUP_X, GROUP_Y, GROUP_Z, GROUPS_X, GROUPS_Y, GROUPS_Z;
static void kernel();

enum { FINE, MISSED_SHUFFLE, MISSED_BARRIER, ENDLESS };

static void end_turn() {
  if (_setjmp(turns[thread]) == 0) {
    _longjmp(next_turn, 1);
  }
}

// Whether a thread may go on after its last barrier; an error if another never comes there.
static bool may_go_on(int waiting) {
  for (int one = 0; one < num_threads; one++) {
    if (num_barriers[one] < num_barriers[waiting]) {
      if (is_done[one]) {
        _longjmp(failure, MISSED_BARRIER);
      }
      return false;
    }
  }
  return true;
}

static void wait_for_group() {
  num_barriers[thread]++;
  is_waiting[thread] = true;
  end_turn();
  is_waiting[thread] = false;
}

// Two buffers suffice: a thread comes to the next shuffle but one after all have read the first.
static float shuffled(float number, int other) {
  const int own = ++num_shuffles[thread];
  shown[own % 2][thread] = number;
  shown_other[own % 2][thread] = other;
  end_turn();
  const int partner = thread ^ other;
  const bool is_wrong = partner >= num_threads || partner / 32 != thread / 32 ||
      num_shuffles[partner] < own || shown_other[own % 2][partner] != other;
  if (is_wrong) {
    _longjmp(failure, MISSED_SHUFFLE);
  }
  return shown[own % 2][partner];
}

static bool is_any(bool flag) {
  bool any = false;
  const float own = flag ? 1.0f : 0.0f;
  shuffled(own, 0);
  const int turn = num_shuffles[thread] % 2;
  for (int lane = 0; lane < 32; lane++) {
    any = any || shown[turn][thread / 32 * 32 + lane] != 0.0f;
  }
  return any;
}

// Copies are made when a thread waits for them, as late as they may come.
struct Copy {
  uint32_t *to, words[4];
  int count, group;
};
constexpr int MOST_COPIES = 256;
static Copy copies[MOST_THREADS][MOST_COPIES];
static int num_copies[MOST_THREADS], num_groups[MOST_THREADS];

#define COPY_WORDS(count, to, from, is_there) copy_words(count, to, from, is_there)
#define END_COPIES num_groups[thread]++;
#define WAIT_FOR_COPIES(rest) wait_for_copies(rest)

static void copy_words(int count, uint32_t* to, const uint32_t* from, bool is_there) {
  Copy& copy = copies[thread][num_copies[thread]++];
  copy.to = to;
  copy.count = count;
  copy.group = num_groups[thread];
  for (int i = 0; i < count; i++) {
    copy.words[i] = is_there ? from[i] : 0;
  }
}

static void wait_for_copies(int rest) {
  int kept = 0;
  for (int i = 0; i < num_copies[thread]; i++) {
    const Copy copy = copies[thread][i];
    if (copy.group < num_groups[thread] - rest) {
      memcpy(copy.to, copy.words, 4 * copy.count);
    } else {
      copies[thread][kept++] = copy;
    }
  }
  num_copies[thread] = kept;
}

#define PERMUTE(one, other, places) permuted(one, other, places)
#define PAIR(is_bfloat, low, high) pair_of_floats<is_bfloat>(low, high)

#define TRANSPOSED(pair) transposed(pair)

static inline uint32_t permuted(uint32_t one, uint32_t other, uint32_t places) {
  const uint64_t bytes = uint64_t(other) << 32 | one;
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) {
    found |= uint32_t(bytes >> (8 * ((places >> (4 * i)) & 7)) & 255) << (8 * i);
  }
  return found;
}

template <int IS_BFLOAT>
static inline uint32_t pair_of_floats(float low, float high) {
  return IS_BFLOAT ? bfloat(low).bits | uint32_t(bfloat(high).bits) << 16
                   : half(low).bits | uint32_t(half(high).bits) << 16;
}

static uint32_t factors[2][MOST_THREADS][6];

// As the threads of a simdgroup on CUDA have the numbers of such matrices.
template <int IS_BFLOAT, typename FIRST, typename SECOND>
static void multiply(FIRST first, SECOND second, const float (&start)[4], float (&sum)[4]) {
  const int own = (num_shuffles[thread] + 1) % 2;
  memcpy(factors[own][thread], first.at, sizeof(first.at));
  memcpy(factors[own][thread] + 4, second.at, sizeof(second.at));
  shuffled(0.0f, 0);
  const int begin = thread / 32 * 32;
  for (int i = 0; i < 4; i++) {
    const int row = thread % 32 / 4 + i / 2 * 8;
    const int column = thread % 4 * 2 + i % 2;
    sum[i] = start[i];
    for (int k = 0; k < 16; k++) {
      const int place = k % 8 / 2;
      const uint32_t one = factors[own][begin + row % 8 * 4 + place][row / 8 + k / 8 * 2];
      const uint32_t other = factors[own][begin + column * 4 + place][4 + k / 8];
      const uint32_t low = one >> (16 * (k % 2)), high = other >> (16 * (k % 2));
      sum[i] += IS_BFLOAT ? float(FROM_BITS(bfloat, low)) * float(FROM_BITS(bfloat, high))
                          : float(FROM_BITS(half, low)) * float(FROM_BITS(half, high));
    }
  }
}

// Of 8 by 8 numbers of 2 bytes: row lane / 4 and columns 2 * (lane % 4) and the next are a thread's.
static uint32_t transposed(uint32_t pair) {
  const int own = (num_shuffles[thread] + 1) % 2;
  factors[own][thread][0] = pair;
  shuffled(0.0f, 0);
  const int row = thread % 32 / 4, column = thread % 4 * 2;
  const int from = thread / 32 * 32 + row / 2;
  const uint32_t low = factors[own][from + 4 * column][0] >> (16 * (row % 2));
  const uint32_t high = factors[own][from + 4 * (column + 1)][0] >> (16 * (row % 2));
  return (low & 0xFFFF) | high << 16;
}

static void run_thread() {
  for (;;) {
    kernel();
    is_done[thread] = true;
    end_turn();
  }
}

// Gives each thread of a simdgroup a turn that may have one; whether any had.
static bool run_turns(int simd) {
  volatile bool has_run = false;
  for (volatile int lane = 0; lane < 32; lane++) {
    thread = 32 * simd + lane;
    if (thread < num_threads && !is_done[thread] && !(is_waiting[thread] && !may_go_on(thread))) {
      if (_setjmp(next_turn) == 0) {
        _longjmp(turns[thread], 1);
      }
      has_run = true;
    }
  }
  return has_run;
}

static int run_group(bool is_reversed) {
  volatile int num_turns = 0;
  volatile bool has_run = true;
  const int num_simds = (num_threads + 31) / 32;
  memset(num_shuffles, 0, sizeof(num_shuffles));
  memset(num_barriers, 0, sizeof(num_barriers));
  memset(num_copies, 0, sizeof(num_copies));
  memset(is_done, 0, sizeof(is_done));
  memset(is_waiting, 0, sizeof(is_waiting));
  is_first_turn = true;
  const int failed = _setjmp(failure);
  if (failed) {
    return failed;
  }
  while (has_run) {
    has_run = false;
    for (volatile int simd = 0; simd < num_simds; simd++) {
      while (run_turns(is_reversed ? num_simds - 1 - simd : simd)) {
        has_run = true;
        if (++num_turns > MOST_TURNS) {
          return ENDLESS;
        }
      }
    }
  }
  return FINE;
}

// Makes a thread's stack, and stops before it runs the kernel.
static void begin_thread() {
  if (_setjmp(turns[thread]) == 0) {
    swapcontext(&contexts[thread], &starting);
  }
  run_thread();
}

static int run_groups(const int* groups, int threads) {
  num_threads = threads;
  stacks = (char*)malloc(size_t(threads) * STACK_BYTES);
  for (thread = 0; thread < threads; thread++) {
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks + size_t(thread) * STACK_BYTES;
    contexts[thread].uc_stack.ss_size = STACK_BYTES;
    contexts[thread].uc_link = 0;
    makecontext(&contexts[thread], begin_thread, 0);
    swapcontext(&starting, &contexts[thread]);
  }
  int failed = FINE;
  GROUPS_X = groups[0];
  GROUPS_Y = groups[1];
  GROUPS_Z = groups[2];
  const int num_runs = GROUPS_X * GROUPS_Y * GROUPS_Z;
  for (int run = 0; run < num_runs && !failed; run++) {
    const int group = is_backward ? num_runs - 1 - run : run;
    GROUP_X = group % GROUPS_X;
    GROUP_Y = group / GROUPS_X % GROUPS_Y;
    GROUP_Z = group / GROUPS_X / GROUPS_Y;
    failed = run_group((GROUP_X + GROUP_Y + GROUP_Z) % 2);
  }
  free(stacks);
  return failed;
}
