// Records of one token of each row: inputs keys and values, output records. The first simdgroups of
// a threadgroup have the key of one KV head, the others the value; each thread has eight numbers.
constexpr int KEY_UNITS = KEY_SIZE / 8;
constexpr int KEY_THREADS = (KEY_UNITS + 31) / 32 * 32;
constexpr int VALUE_UNITS = VALUE_SIZE / 8;
const int head = GROUP_X;
const int row = GROUP_Y;
GLOBAL uint32_t* record = records + (int64_t(row) * GROUPS_X + head) * WORDS;
const bool is_key = THREAD_X < KEY_THREADS;
const int unit = is_key ? THREAD_X : THREAD_X - KEY_THREADS;
const bool is_used = unit < (is_key ? KEY_UNITS : VALUE_UNITS);
Eight given;
UNROLL for (int i = 0; i < 8; i++) {
  given.at[i] = 0.0f;
}
if (is_used && is_key) {
  given = read_eight<T>(
      keys + row * int64_t(keys_strides[0]) + head * int64_t(keys_strides[1]) +
          8 * unit * int64_t(keys_strides[3]),
      keys_strides[3]);
} else if (is_used) {
  given = read_eight<T>(
      values + row * int64_t(values_strides[0]) + head * int64_t(values_strides[1]) +
          8 * unit * int64_t(values_strides[3]),
      values_strides[3]);
}
// A thread fills up the last word of scales, before others write its bytes.
if (unit == 0 && is_key && VALUE_SCALES > KEY_SCALES) {
  record[VALUE_SCALES - 1] = 0;
}
if (unit == 0 && !is_key && WORDS > VALUE_SCALES) {
  record[WORDS - 1] = 0;
}
DEVICE_BARRIER;
// Where keys and values are packed alike, the code is there once.
constexpr int ARE_ALIKE = KEY_FORM == VALUE_FORM && KEY_BITS == VALUE_BITS && KEY_GROUP == VALUE_GROUP;
GLOBAL uint32_t* scales = record + (is_key ? KEY_SCALES : VALUE_SCALES);
if (is_key || ARE_ALIKE) {
  pack_eight<T, KEY_FORM, KEY_BITS, KEY_GROUP, 2>(
      given, unit, is_used, AS_FLOAT(uint32_t(is_key ? KEY_STEP : VALUE_STEP)),
      (GLOBAL uint8_t*)(is_key ? record : record + VALUE_CODES), (GLOBAL uint8_t*)scales,
      (GLOBAL T*)scales + 1);
} else {
  pack_eight<T, VALUE_FORM, VALUE_BITS, VALUE_GROUP, 2>(
      given, unit, is_used, AS_FLOAT(uint32_t(VALUE_STEP)),
      (GLOBAL uint8_t*)(record + VALUE_CODES), (GLOBAL uint8_t*)scales, (GLOBAL T*)scales + 1);
}
