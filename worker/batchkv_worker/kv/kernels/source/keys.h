// Numbers as keys whose order is theirs; both zeros have one key.
#define LOWEST_NUMBER AS_FLOAT(0xFF800000u)

FN uint32_t key_of(float number) {
  const uint32_t bits = AS_UINT(number + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

FN float number_of_key(uint32_t key) {
  return AS_FLOAT(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}
