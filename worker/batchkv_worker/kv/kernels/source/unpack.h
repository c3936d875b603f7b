// The parts of records: inputs records; outputs key0, key1 ..., value0 and so on, as many as there
// are. A threadgroup has one column of one row and KV head.
const int column = GROUP_Y;
const int row = GROUP_Z / HEADS;
const int head = GROUP_Z % HEADS;
const int64_t token = int64_t(GROUP_Z) * GROUPS_Y + column;
const GLOBAL uint32_t* record = records + row * int64_t(records_strides[0]) +
    head * int64_t(records_strides[1]) + column * int64_t(records_strides[2]);
for (int word = THREAD_X; word < WORDS; word += 64) {
  const uint32_t bits = record[word];
  if (word < VALUE_CODES) {
    ((GLOBAL uint32_t*)key0)[token * VALUE_CODES + word] = bits;
  } else if (word < KEY_SCALES) {
    ((GLOBAL uint32_t*)value0)[token * (KEY_SCALES - VALUE_CODES) + word - VALUE_CODES] = bits;
  } else if (word < VALUE_SCALES) {
#if KEY_PARTS == 3
    unpack_pair<T>(bits, word - KEY_SCALES, key1 + token * (KEY_SIZE / KEY_GROUP),
                   key2 + token * (KEY_SIZE / KEY_GROUP));
#elif KEY_PARTS == 2
    unpack_scales(bits, word - KEY_SCALES, KEY_SIZE / KEY_GROUP, token, key1);
#endif
  } else {
#if VALUE_PARTS == 3
    unpack_pair<T>(bits, word - VALUE_SCALES, value1 + token * (VALUE_SIZE / VALUE_GROUP),
                   value2 + token * (VALUE_SIZE / VALUE_GROUP));
#elif VALUE_PARTS == 2
    unpack_scales(bits, word - VALUE_SCALES, VALUE_SIZE / VALUE_GROUP, token, value1);
#endif
  }
}
