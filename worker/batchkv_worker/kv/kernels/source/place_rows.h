// The records of whole slots that rows of a computed group come into. Inputs places, and the parts of
// the group, key0, key1 ..., value0 and so on, as many as there are; output records. Of each row,
// places has its number in the group, the columns at which it begins and ends, and what is added to a
// column for its token's place in the parts. A threadgroup has one column of one row and KV head.
#define OF_TOKEN(part, strides) \
  (part + place[0] * int64_t(strides[0]) + GROUP_Y * int64_t(strides[1]) + \
   (column + place[3]) * int64_t(strides[2]))
const int column = GROUP_X;
const GLOBAL int32_t* place = places + 4 * GROUP_Z;
const int word = THREAD_X;
uint32_t bits = 0;
if (column >= place[1] && column < place[2] && word < WORDS) {
  if (word < VALUE_CODES) {
    bits = ((const GLOBAL uint32_t*)OF_TOKEN(key0, key0_strides))[word];
  } else if (word < KEY_SCALES) {
    bits = ((const GLOBAL uint32_t*)OF_TOKEN(value0, value0_strides))[word - VALUE_CODES];
  } else if (word < VALUE_SCALES) {
#if KEY_PARTS == 3
    bits = join_pair(OF_TOKEN(key1, key1_strides), OF_TOKEN(key2, key2_strides),
                     word - KEY_SCALES);
#elif KEY_PARTS == 2
    bits = join_scales(OF_TOKEN(key1, key1_strides), word - KEY_SCALES, KEY_SIZE / KEY_GROUP);
#endif
  } else {
#if VALUE_PARTS == 3
    bits = join_pair(OF_TOKEN(value1, value1_strides), OF_TOKEN(value2, value2_strides),
                     word - VALUE_SCALES);
#elif VALUE_PARTS == 2
    bits = join_scales(OF_TOKEN(value1, value1_strides), word - VALUE_SCALES,
                       VALUE_SIZE / VALUE_GROUP);
#endif
  }
}
if (word < WORDS) {
  records[((int64_t(GROUP_Z) * GROUPS_Y + GROUP_Y) * GROUPS_X + column) * WORDS + word] = bits;
}
