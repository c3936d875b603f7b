// Packed keys and values of a chunk's tokens, part by part. With DENSE also the numbers that the parts
// give, for attention of the chunk; with BEHIND those of a prefix before them, that all rows share or
// that each row has for itself.
// Inputs keys, values, and the prefix's parts; outputs the parts, then dense keys and dense values. A
// threadgroup has one column of one row, for some KV heads. Dense outputs may have more rows than there
// are, and more columns: these are zeros. The first KEY_LANES of a head's SPAN threads have its key, the
// others its value; each thread has eight numbers.
constexpr int KEY_UNITS = KEY_SIZE / 8;
constexpr int VALUE_UNITS = VALUE_SIZE / 8;
const int head = GROUP_X * HEADS + THREAD_X / SPAN;
const int row = GROUP_Y;
#if BEHIND
const int before = old_key_codes_shape[2];
const int prefix = old_key_codes_shape[0] > 1 ? row : 0;
#else
const int before = 0;
#endif
const int tokens = keys_shape[2];
const int token = GROUP_Z - before;
const bool is_key = THREAD_X % SPAN < KEY_LANES;
const int unit = is_key ? THREAD_X % SPAN : THREAD_X % SPAN - KEY_LANES;
const bool is_used = unit < (is_key ? KEY_UNITS : VALUE_UNITS);
// Where keys and values are packed alike, the code is there once.
constexpr int ARE_ALIKE = KEY_BITS == VALUE_BITS && KEY_GROUP == VALUE_GROUP;
Eight dense;
UNROLL for (int i = 0; i < 8; i++) {
  dense.at[i] = 0.0f;
}
if (row < keys_shape[0] && token >= 0 && token < tokens) {
  Eight given = dense;
  if (is_used && is_key) {
    given = read_eight<T>(
        keys + row * int64_t(keys_strides[0]) + head * int64_t(keys_strides[1]) +
            token * int64_t(keys_strides[2]) + 8 * unit * int64_t(keys_strides[3]),
        keys_strides[3]);
  } else if (is_used) {
    given = read_eight<T>(
        values + row * int64_t(values_strides[0]) + head * int64_t(values_strides[1]) +
            token * int64_t(values_strides[2]) + 8 * unit * int64_t(values_strides[3]),
        values_strides[3]);
  }
  const int64_t vector = (row * int64_t(keys_shape[1]) + head) * tokens + token;
  const int64_t key_groups = vector * (KEY_SIZE / KEY_GROUP);
  const int64_t value_groups = vector * (VALUE_SIZE / VALUE_GROUP);
  GLOBAL uint8_t* codes = is_key
      ? (GLOBAL uint8_t*)(key_codes + vector * (KEY_SIZE * KEY_BITS / 32))
      : (GLOBAL uint8_t*)(value_codes + vector * (VALUE_SIZE * VALUE_BITS / 32));
  GLOBAL T* scales = is_key ? key_scales + key_groups : value_scales + value_groups;
  GLOBAL T* biases = is_key ? key_biases + key_groups : value_biases + value_groups;
  Packed<T> packed;
  if (is_key || ARE_ALIKE) {
    packed = pack_eight<T, AFFINE_FORM, KEY_BITS, KEY_GROUP, 1>(
        given, unit, is_used, 0.0f, codes, (GLOBAL uint8_t*)scales, biases);
  } else {
    packed = pack_eight<T, AFFINE_FORM, VALUE_BITS, VALUE_GROUP, 1>(
        given, unit, is_used, 0.0f, codes, (GLOBAL uint8_t*)scales, biases);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    dense.at[i] = float(GIVEN_BACK(T, packed.scale, packed.codes.at[i], packed.bias));
  }
}
#if BEHIND
if (row < keys_shape[0] && token < 0 && is_used && is_key) {
  dense = give_eight<T, KEY_BITS, KEY_GROUP>(
      OF_PREFIX(old_key_codes, old_key_codes_strides),
      OF_PREFIX(old_key_scales, old_key_scales_strides),
      OF_PREFIX(old_key_biases, old_key_biases_strides), unit);
} else if (row < keys_shape[0] && token < 0 && is_used) {
  dense = give_eight<T, VALUE_BITS, VALUE_GROUP>(
      OF_PREFIX(old_value_codes, old_value_codes_strides),
      OF_PREFIX(old_value_scales, old_value_scales_strides),
      OF_PREFIX(old_value_biases, old_value_biases_strides), unit);
}
#endif
#if DENSE
if (is_used) {
  const int64_t vector = (row * int64_t(keys_shape[1]) + head) * GROUPS_Z + GROUP_Z;
  write_eight(
      dense, is_key ? dense_keys + vector * KEY_SIZE : dense_values + vector * VALUE_SIZE, unit);
}
#endif
