// A pair of numbers, turned by an angle. Not inlined where the language allows it: the code for large
// angles is long, and MLX reads all code of a kernel at each call.
struct Turned {
  float low, high;
};

FN_APART Turned turned_by(float angle, float x, float y) {
  float sine, cosine;
  SINE_COSINE(angle, sine, cosine);
  return {x * cosine - y * sine, x * sine + y * cosine};
}
