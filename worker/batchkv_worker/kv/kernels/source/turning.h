// An angle's sine and cosine. Not inlined where the language allows it: the code for large angles is
// long, and MLX reads all code of a kernel at each call.
struct Turned {
  float sine, cosine;
};

FN_APART Turned sine_and_cosine(float angle) {
  float sine, cosine;
  SINE_COSINE(angle, sine, cosine);
  return {sine, cosine};
}
